"""At which call of a function its step is taken."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from automesh.program.capture.flow.finder import FoundStep, StepFinder
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


def test_a_step_that_ends_early_keeps_its_values_on_the_host() -> None:
    jitted: Any = jax.jit(train, donate_argnums=0)
    finder = StepFinder(wanted="", on_long_loop=lambda: None)
    w, x = jnp.eye(32), np.zeros((16, 32), np.float32)
    before = np.array(w)
    for turn in range(2):
        x[...] = turn + 1.0  # As loaders do, which write each batch into the same array.
        before, given = np.array(w), (w, x)
        run = partial(jitted, *given)
        call = Call(jitted=jitted, args=given, kwargs={}, run=run, function=train, settings={})
        w, _ = finder.call(call)
    x[...] = np.nan
    found = finder.ended()
    assert isinstance(found, FoundStep)
    assert not isinstance(found.whole.args[0], jax.Array), "jax has deleted it"
    made = found.with_values()
    assert np.array_equal(made.args[0], before)
    assert np.array_equal(made.args[1], np.full((16, 32), 2.0))
