"""At which call of a function its step is taken."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.capture.flow.finder import StepFinder
from automesh.program.capture.hooks import Call
from automesh.program.capture.run_script import ScriptStopped


def train(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of a gradient descent."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - x) ** 2))(w)
    return w - 0.1 * gradient, loss


def test_a_script_that_was_let_go_on_is_stopped_at_a_usual_call() -> None:
    jitted: Any = jax.jit(train)
    asked = list[bool]()

    def may_stop(has_gradient: bool) -> bool:
        asked.append(has_gradient)
        return len(asked) > 2

    finder = StepFinder(wanted="", on_long_loop=lambda: None, may_stop=may_stop)
    w, calls = jnp.eye(32), 0
    with pytest.raises(ScriptStopped):
        for rows in (16, 16, 16, 16, 3, 16, 16):
            x = jnp.full((rows, 32), float(calls))
            given = (w, x)
            run = partial(jitted, *given)
            call = Call(jitted=jitted, args=given, kwargs={}, run=run, function=train, settings={})
            w, _ = finder.call(call)
            calls += 1
    assert asked == [True, True, True]
    assert calls == 5  # Not at the call with three rows.
    assert finder.found is not None
    assert finder.found.whole.args[1].shape == (16, 32)
