"""What only shows something on the host is taken out of a step, wherever in it it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from automesh.program.capture.shown import without_shown
from automesh.program.capture.world import told

W, X = jnp.full((3, 4, 4), 0.1), jnp.ones(4)


def loss(w: Any, x: Any) -> Any:
    jax.debug.print("starts from {}", x[0], ordered=True)

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
    assert not program.effects
    value, slope = jaxpr_as_fun(program)(W, X)
    wanted = step(W, X)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(slope, wanted[1], rtol=1e-6)
    (said,) = told.told()
    assert said.startswith("calls from the step to the host that only show something")
    assert "test_shown.py:19, test_shown.py:22, test_shown.py:23" in said and said.endswith(
        "are left out"
    )


def test_a_step_that_shows_nothing_stays_as_it_is() -> None:
    traced = jax.jit(lambda w: jnp.tanh(w).sum()).trace(W)
    assert without_shown(traced.jaxpr) is traced.jaxpr
    kept = jax.jit(
        lambda w: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct((), w.dtype), w[0, 0, 0])
    )
    program = kept.trace(W).jaxpr
    assert without_shown(program) is program
