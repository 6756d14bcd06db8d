"""The step of a script with a mesh of its own, with its state split as a mapping says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from automesh.mesh.axes import MeshAxis
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import Capture, Carried, ScriptMesh, ScriptStep, SourceLine
from automesh.program.capture.step_call import trace
from automesh.program.carry.stored_step import store_in
from automesh.program.infer.classes import step_classes
from automesh.program.infer.search.around import lay_around
from automesh.program.infer.search.build import rearranged_build
from automesh.program.infer.search.layout import Layout
from automesh.program.nouns import Entry
from automesh.program.script.build import build_on

BY_COLUMNS, ROWS = P(None, "model"), P("data")
AXES = (("data", 4), ("model", 2))
OTHER = (MeshAxis(name="data", ici=2), MeshAxis(name="model", ici=4))


def train_step(params: Any, momentum: Any, tokens: Any) -> Any:
    def loss(params: Any) -> Any:
        hidden = params["embed"][tokens]
        hidden += jnp.tanh(hidden @ params["up"]) @ params["down"]
        hidden = jax.lax.with_sharding_constraint(hidden, P("data"))
        logits = jax.nn.log_softmax(hidden @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))

    value, slope = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, slope)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


@dataclass(frozen=True)
class Stored:
    build: Any
    layout: Layout

    def run(self, **mapping: str) -> tuple[Any, Any]:
        """One step on the other mesh: its arguments and its results."""
        built = build_on(
            self.build, OTHER, mapping=tuple((name, (axis,)) for name, axis in mapping.items())
        )
        with jax.set_mesh(built.mesh):
            args = built.workload.args
            return args, built.workload.step(*args)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("step")
    rng = np.random.RandomState(0)
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def put(value: Any, spec: P) -> Any:
        return jax.device_put(jnp.asarray(value, jnp.float32), NamedSharding(mesh, spec))

    params = {
        "embed": put(rng.randn(256, 32) * 0.1, BY_COLUMNS),
        "up": put(rng.randn(32, 64) * 0.1, BY_COLUMNS),
        "down": put(rng.randn(64, 32) * 0.1, P("model")),
    }
    momentum = jax.tree.map(jnp.zeros_like, params)
    tokens = jax.device_put(rng.randint(0, 256, (16, 8)), NamedSharding(mesh, ROWS))
    args = (params, momentum, tokens)
    with jax.set_mesh(mesh):
        call = trace(
            Call(jitted=jax.jit(train_step), args=args, kwargs={}, run=lambda: None,
                 function=train_step),
            with_names=True,
        )  # fmt: skip
    carried = (Carried(output=0, argument=0, count=6),)
    table, split = ((), ("model",)), (("model",), ())
    layout = lay_around(
        step_classes(call, carried),
        (split, table, table, split, table, table, (("data",), ())),
        axes=("data", "model"),
        batch_axes=("data",),
        num_devices=8,
    )
    line = SourceLine(file="train.py", line=1)
    capture = Capture(
        mesh=ScriptMesh(axes=AXES, axis_types=("auto", "auto"), made_at=line),
        step=ScriptStep(
            name="train_step", defined_at=line, called_at=line, argument_bytes=0, carried=carried
        ),
        layout=layout,
        folder=str(folder),
        carried_by="trace",
    )
    store_in(str(folder), call, mesh, [leaf.sharding for leaf in call.leaves])
    entry = Entry(kind="script", location="train.py", function="train_step", capture=capture)

    def never(*_: Any) -> Any:
        raise AssertionError("the script itself is run")

    return Stored(build=rearranged_build(entry, never), layout=layout)


def test_without_a_mapping_the_step_is_what_the_script_wrote(stored: Stored) -> None:
    args, results = stored.run()
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(args)]
    assert specs[:3] == [P("model"), BY_COLUMNS, BY_COLUMNS]
    assert specs[-1] == ROWS
    assert np.isfinite(float(jax.tree.leaves(results)[-1]))


@pytest.mark.parametrize(
    "mapping",
    [
        {"vocab_weights": "model"},
        {"params": "data", "moments": "data"},
        {"moments": "data"},
        {"vocab_weights": "model", "params": "data"},
    ],
    ids=lambda one: "+".join(one),
)
def test_state_that_is_split_otherwise_gives_the_same_and_comes_back_so(
    stored: Stored, mapping: dict[str, str]
) -> None:
    assert set(mapping) <= {axis.name for axis in stored.layout.logical}
    _, written = stored.run()
    args, results = stored.run(**mapping)
    before, after = jax.tree.leaves(args), jax.tree.leaves(results)
    expected = [
        one.over({name: (axis,) for name, axis in mapping.items()})
        for one in stored.layout.arguments
    ]
    for leaf, over in zip(before, expected, strict=True):
        whole = (*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec)))
        assert tuple(_axes(part) for part in whole) == over
    for leaf, result in zip(before[:6], after[:6], strict=True):
        assert result.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    for one, other in zip(jax.tree.leaves(written), after, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=2e-6)


def _axes(part: Any) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())
