"""Arguments that are kept on the host come back as they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from automesh.program.capture.flow.host_copies import copied
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import Capture, Carried, ScriptMesh, ScriptStep, SourceLine
from automesh.program.capture.step_call import trace, workload_of
from automesh.program.execute.prepare import Ready


def test_a_weak_type_stays_weak() -> None:
    for array in (jnp.full((2, 3), 0.1), jnp.full((2, 3), 0.1, jnp.float32)):
        (kept,) = copied([array], 1 << 20) or ()
        assert kept.made().weak_type == array.weak_type
        np.testing.assert_array_equal(kept.made(), array)


def test_an_array_that_nobody_has_put_anywhere_stays_so() -> None:
    for array in (jnp.ones(3), jax.device_put(jnp.ones(3), jax.devices()[0]), jax.random.key(0)):
        (kept,) = copied([array], 1 << 20) or ()
        assert kept.made().committed == array.committed


def test_a_donated_argument_that_comes_back_as_it_was_is_carried_on() -> None:
    """As the learning rate among the variables of a Keras optimizer. Before, the next step was
    given the array that the first one had taken."""

    def train_step(rows: Any, state: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.mean((rows @ w) ** 2))(state["w"])
        rate = jax.jit(lambda x: x)(state["rate"])
        return gradient.sum(), rows + 1, {"rate": rate, "w": state["w"] - state["rate"] * gradient}

    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    args = (jnp.ones((3, 4)), {"rate": jnp.float32(0.1), "w": jnp.ones((4, 2))})
    line = SourceLine(file="/home/me/train.py", line=1)
    step = ScriptStep(
        name="train_step",
        defined_at=line,
        called_at=line,
        argument_bytes=1,
        carried=(Carried(argument=2, output=3, count=1),),
    )
    capture = Capture(
        mesh=ScriptMesh(axes=(("data", 1),), axis_types=("auto",), made_at=line), step=step
    )
    call = trace(Call(jitted=jitted, args=args, kwargs={}, run=lambda: None, function=train_step))
    workload = workload_of(call, capture, None)
    assert dict(getattr(workload, "carried")) == {2: 3, 1: 2}  # noqa: B009
    assert workload.advance is not None
    rows, state = workload.advance(jax.eval_shape(workload.step, *args), args)
    assert rows is args[0] and not any(isinstance(leaf, jax.Array) for leaf in state.values())
    # What the script makes anew for every call is made anew here, too.
    ready: Any = SimpleNamespace(workload=workload, donated=(True, True, True))
    lost: Any = Ready.lost
    assert lost.fget(ready) == (0,)


def test_a_step_of_which_nothing_comes_back_is_given_the_same_arguments_each_time() -> None:
    """Gradients have the form of parameters, and weights that of data. Before, the next step was
    given the first results in place of the first arguments."""
    line = SourceLine(file="/home/me/train.py", line=1)
    step = ScriptStep(name="loss", defined_at=line, called_at=line, argument_bytes=1)
    capture = Capture(
        mesh=ScriptMesh(axes=(("data", 1),), axis_types=("auto",), made_at=line), step=step
    )
    args = ({"w": jnp.ones((4, 2), jnp.float32)}, jnp.ones((3, 4)))
    for donated in ((), (0,)):
        function = jax.grad(lambda p, rows: jnp.mean((rows @ p["w"]) ** 2))
        jitted: Any = jax.jit(function, donate_argnums=donated)
        given = Call(jitted=jitted, args=args, kwargs={}, run=lambda: None, function=function)
        call = trace(given)
        workload = workload_of(call, capture, None)
        if donated:  # They are gone, so that something has to come back.
            assert workload.advance is None
            continue
        assert workload.advance is not None
        after = workload.advance(workload.step(*args), args)
        assert after[0]["w"] is args[0]["w"] and after[1] is args[1]
