"""Roles of numbers without dimensions, and of arrays that follow parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from automesh.program.infer.nouns import Role
from tests.support.infer_models import XENT, Model, f32, i32

LAYERS = {"w1": f32(24, 128), "w2": f32(128, 96), "w3": f32(96, 10)}


def network(p: Any, x: Any) -> Any:
    return jax.nn.relu(jax.nn.relu(x @ p["w1"]) @ p["w2"]) @ p["w3"]


@pytest.mark.parametrize("optimizer", [optax.adam(1e-3), optax.lion(1e-3), optax.adafactor(1e-3)])
def test_moments_of_a_number_are_moments(optimizer: Any) -> None:
    """Before, what an optimizer keeps for a temperature was a counter."""
    params = {**LAYERS, "t": f32()}

    def step(p: Any, opt: Any, mean: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean(XENT(network(p, x) * jnp.exp(p["t"]), y))

        value, grads = jax.value_and_grad(loss)(p)
        updates, opt = optimizer.update(grads, opt, p)
        return optax.apply_updates(p, updates), opt, 0.9 * mean + 0.1 * value, value

    model = Model(
        step=step,
        args=(params, jax.eval_shape(optimizer.init, params), f32(), f32(64, 24), i32(64)),
        names=("p", "opt", "mean", "x", "y"),
        num_state=3,
    )
    found = model.classes()
    assert {one.name: one.role for one in found.arguments}["p['t']"] == Role.PARAMETER
    assert {one.name: one.role for one in found.arguments}["mean"] == Role.STATISTIC
    own = [one for one in found.arguments if one.name.startswith("opt") and "['t']" in one.name]
    numbers = [one for one in own if not one.shape]
    assert numbers
    for one in numbers:
        assert one.role == Role.MOMENT
        assert one.of is not None
        assert found.arguments[one.of].name == "p['t']"
    (count,) = [one for one in found.arguments if one.name.endswith(".count")][:1]
    assert count.role == Role.COUNTER


def test_momentum_that_the_gradient_is_taken_ahead_with_is_no_target() -> None:
    """Nesterov's momentum: before, the parameters were copies, and the momentum the parameters."""

    def step(p: Any, v: Any, x: Any, y: Any) -> Any:
        ahead = jax.tree.map(lambda p, v: p + 0.9 * v, p, v)
        value, grads = jax.value_and_grad(lambda p: jnp.mean(XENT(network(p, x), y)))(ahead)
        v = jax.tree.map(lambda v, g: 0.9 * v - 0.1 * g, v, grads)
        return jax.tree.map(jnp.add, p, v), v, value

    args = (LAYERS, LAYERS, f32(64, 24), i32(64))
    found = Model(step=step, args=args, names=("p", "v", "x", "y"), num_state=2).classes()
    for one in found.arguments[:3]:
        assert one.role == Role.PARAMETER
    for place, one in enumerate(found.arguments[3:6]):
        assert (one.role, one.of) == (Role.MOMENT, place)
