"""What only shows something on the host is taken out of a step, wherever in it it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from automesh.program.capture.shown import without_shown
from automesh.program.capture.world import told

W, X = jnp.full((3, 4, 4), 0.1), jnp.ones(4)


def loss(w: Any, x: Any) -> Any:
    jax.debug.print("starts from {}", x[0], ordered=True)
    jax.debug.inspect_array_sharding(x, callback=print)

    def layer(state: Any, weights: Any) -> tuple[Any, None]:
        jax.debug.callback(lambda _: None, state[0])
        jax.lax.cond(state[0] > 0, lambda: jax.debug.print("positive"), lambda: None)
        return jnp.tanh(state @ weights), None

    return jax.lax.scan(jax.checkpoint(layer), x, w)[0].sum()


def test_a_step_shows_nothing_and_computes_the_same() -> None:
    step = jax.value_and_grad(loss)
    traced = jax.jit(step).trace(W, X)
    told.forget()
    program = without_shown(traced.jaxpr)
    assert "debug" in str(traced.jaxpr) and "debug" not in str(program)
    assert "inspect" in str(traced.jaxpr) and "inspect" not in str(program)
    assert not program.effects
    value, slope = jaxpr_as_fun(program)(W, X)
    wanted = step(W, X)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(slope, wanted[1], rtol=1e-6)
    (said,) = told.told()
    assert said.startswith("calls from the step to the host that only show something")
    assert (
        "test_shown.py:20, test_shown.py:21, test_shown.py:24, test_shown.py:25" in said
        and said.endswith("are left out")
    )


def test_a_step_that_shows_nothing_stays_as_it_is() -> None:
    traced = jax.jit(lambda w: jnp.tanh(w).sum()).trace(W)
    assert without_shown(traced.jaxpr) is traced.jaxpr
    # A callback whose value is always used is no check.
    kept = jax.jit(
        lambda w: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((), w.dtype), w[0, 0, 0])
    )
    program = kept.trace(W).jaxpr
    assert without_shown(program) is program


def checked(x: Any, fails: Any) -> Any:
    """What `equinox.error_if` does: returns `x`, or calls Python to raise."""

    def stop(_: Any) -> Any:
        raise RuntimeError("a check failed")

    def shown(given: Any, _: Any) -> Any:
        return jax.tree.map(np.zeros_like, given)

    def failed() -> Any:
        return jax.pure_callback(shown, shapes, jax.pure_callback(stop, shapes, 0), 0)

    shapes = jax.eval_shape(lambda: x)
    return jax.lax.cond(fails, failed, lambda: x)


@pytest.mark.parametrize("limit", (9.0, 0.0))
def test_a_check_is_left_out_and_gives_nan_where_it_fails(limit: float) -> None:
    def step(w: Any, x: Any) -> Any:
        def layer(state: Any, weights: Any) -> tuple[Any, None]:
            state, count, scale = checked(
                (state, jnp.int32(3), jnp.float32(1)), jnp.any(state > limit)
            )
            return jnp.tanh(state @ weights) * scale + 0 * count, None

        return jax.lax.scan(layer, x, w)[0].sum()

    traced = jax.jit(step).trace(W, X)
    told.forget()
    program = without_shown(traced.jaxpr)
    assert "callback" in str(traced.jaxpr) and "callback" not in str(program)
    (value,) = jaxpr_as_fun(program)(W, X)
    if limit > 1:
        np.testing.assert_allclose(value, step(W, X), rtol=1e-6)
    else:
        assert np.isnan(value)
    (said,) = told.told()
    assert said.startswith("checks that stop the step from Python if they fail (pure_callback in a")
    assert "test_shown.py:" in said
    # A lowered program has it nowhere, either.
    lowered = jax.jit(jaxpr_as_fun(program)).lower(W, X).as_text()
    assert "callback" not in lowered


def test_a_value_that_python_gives_in_a_branch_stays() -> None:
    def step(w: Any) -> Any:
        rate = jax.lax.cond(
            w[0, 0, 0] > 0,
            lambda: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((), w.dtype), w[0, 0, 0]),
            lambda: w[0, 0, 1],
        )
        return (rate * w).sum()

    program = jax.jit(step).trace(W).jaxpr
    assert without_shown(program) is program
