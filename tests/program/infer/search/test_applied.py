"""`MeshConfig.apply`: three lines in a script make its step the one that was searched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from automesh import MeshConfig
from automesh.errors import UsageError, WrongType
from automesh.mesh.axes import MeshAxis, Plan
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import Capture, Carried, ScriptMesh, ScriptStep, SourceLine
from automesh.program.capture.step_call import trace
from automesh.program.carry.stored_step import store_in
from automesh.program.infer.classes import step_classes
from automesh.program.infer.search.build import inferred_build
from automesh.program.infer.search.layout import lay_out, shardings_of
from automesh.program.nouns import Entry

RNG = np.random.RandomState(0)
DATA = jnp.asarray(RNG.randn(128, 32).astype(np.float32))


def initial() -> Any:
    layer = {"up": RNG.randn(32, 64) * 0.1, "down": RNG.randn(64, 32) * 0.1}
    params = jax.tree.map(lambda one: jnp.asarray(one, jnp.float32), {"layers": [layer, layer]})
    return params, jax.tree.map(jnp.zeros_like, params)


def train_step(params: Any, opt: Any, key: Any) -> Any:
    """The batch is taken inside of the step, from rows that it holds: it needs a constraint."""

    def loss(params: Any) -> Any:
        x = DATA[jax.random.randint(key, (16,), 0, 128)]
        hidden = x
        for layer in params["layers"]:
            hidden = hidden + jnp.tanh(hidden @ layer["up"]) @ layer["down"]
        return jnp.mean((hidden - 1) ** 2)

    value, slope = jax.value_and_grad(loss)(params)
    opt = jax.tree.map(lambda m, g: 0.9 * m + g, opt, slope)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, opt), opt, value


AXES = (MeshAxis(name="dp", ici=2), MeshAxis(name="fsdp", ici=2), MeshAxis(name="tp", ici=2))


def searched(folder: Path) -> tuple[Any, Any, MeshConfig]:
    """The step as a search builds it, its arguments, and the config of the rule."""
    params, opt = initial()
    args, jitted = (params, opt, jax.random.key(0)), jax.jit(train_step)
    call = trace(
        Call(jitted=jitted, args=args, kwargs={}, run=lambda: None, function=train_step),
        with_names=True,
    )
    carried = (Carried(output=0, argument=0, count=8),)
    wide = step_classes(call, carried).arguments[1].dims[1]  # Of params["layers"][0]["up"].
    mapping = {"batch": ("dp", "fsdp"), "params": ("fsdp",), "moments": ("fsdp",), wide: ("tp",)}
    layout = lay_out(step_classes(call, carried), num_devices=8, script="train.py")
    line = SourceLine(file="train.py", line=1)
    capture = Capture(
        mesh=ScriptMesh(axes=(("device", 1),), axis_types=("auto",), made_at=line),
        step=ScriptStep(
            name="train_step", defined_at=line, called_at=line, argument_bytes=0, carried=carried
        ),
        layout=layout,
        folder=str(folder),
        carried_by="trace",
    )
    one = Mesh(np.asarray(jax.devices()[:1]), ("device",))
    store_in(str(folder), call, one, [None] * len(call.leaves))
    config = MeshConfig(
        mesh_shape=(2, 2, 2),
        mesh_axis_names=("dp", "fsdp", "tp"),
        mapping=mapping,
        sharding_patterns=shardings_of(
            layout.arguments, Plan(axes=AXES, mapping=tuple(mapping.items()))
        ),
    )
    entry = Entry(kind="script", location="train.py", function="train_step", capture=capture)
    workload = inferred_build(entry)(config.create_device_mesh(jax.devices()[:8]), mapping)
    return workload.step, workload.args, config


def program(lowered: Any) -> str:
    """The text of a program without the names of its arguments and places."""
    return re.sub(r'loc\(.*?\)|@\w+|jax.result_info = ".*?"', "", lowered.as_text())


def test_the_applied_step_is_the_program_that_was_searched(tmp_path: Path) -> None:
    built, args, config = searched(tmp_path)
    mesh = config.create_device_mesh(jax.devices()[:8])
    applied = config.apply(train_step, mesh=mesh)
    params, opt = initial()
    own = jax.tree.structure((params, opt, 0)).unflatten(jax.tree.leaves(args))
    lowered = applied.lower(*own)
    assert program(lowered) == program(built.lower(*args))
    assert "sharding_constraint" in lowered.as_text()  # The batch that is taken inside.
    for number in range(2):
        key = jax.random.key(number)
        expected = jax.jit(train_step)(params, opt, key)
        args = applied(*args[:2], key) if number else applied(params, opt, key)
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5),
            args,
            expected,
        )
        params, opt = expected[:2]
    up = args[0]["layers"][0]["up"]
    assert up.sharding.spec == P(None, ("tp", "fsdp"))
    assert args[1]["layers"][0]["up"].sharding == up.sharding


def config(**patterns: Any) -> MeshConfig:
    return MeshConfig(
        mesh_shape=(-1,),
        mesh_axis_names=("dp",),
        mapping={"batch": "dp"},
        sharding_patterns=patterns,
    )


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * (x.T @ x @ w)


def test_an_array_that_no_pattern_covers_is_named_at_the_call() -> None:
    with pytest.raises(UsageError, match="no pattern of the rule's shardings covers `w`"):
        config(x=["batch", ""]).apply(step)(jnp.ones((4, 2)), jnp.ones((16, 4)))


def test_what_cannot_be_applied_is_refused() -> None:
    known = config(w=["", ""], x=["batch", ""])
    with pytest.raises(UsageError, match="jitted already, so that `donate_argnums` comes too late"):
        known.apply(jax.jit(step), donate_argnums=0)
    with pytest.raises(WrongType, match="the step must be a function"):
        known.apply(5)
    with pytest.raises(UsageError, match="the rule has no shardings"):
        config().apply(step)


def test_what_is_donated_is_given_up_and_the_name_is_kept() -> None:
    known = config(w=["", ""], x=["batch", ""]).apply(step, donate_argnums=0)
    x = jnp.ones((16, 4))
    w = known(jnp.ones((4, 2)), x)
    again = known(w, x)
    assert w.is_deleted() and not again.is_deleted()
    assert known.__wrapped__ is step
