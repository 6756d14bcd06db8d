"""Roles of numbers without dimensions, and of arrays that follow parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from automesh.program.infer.nouns import Role
from tests.support.infer_models import XENT, Model, descended, f32, i32

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


def loss(p: Any, x: Any, y: Any) -> Any:
    return jnp.mean(XENT(network(p, x), y))


def in_turns(p: Any, x: Any, y: Any) -> Any:
    def turn(total: Any, batch: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(p, *batch)), None

    zeros = jax.tree.map(jnp.zeros_like, p)
    return jax.lax.scan(turn, zeros, (x.reshape(4, 16, 24), y.reshape(4, 16)))[0]


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize("gradient", [jax.grad(loss), jax.jit(jax.grad(loss)), in_turns])
def test_momentum_that_the_gradient_is_taken_ahead_with_is_no_target(
    gradient: Any, is_scheduled: bool
) -> None:
    """Nesterov's momentum: before, the parameters were copies, and the momentum the parameters."""

    def step(p: Any, v: Any, n: Any, x: Any, y: Any) -> Any:
        mu = 0.9 * jnp.minimum(1.0, n / 100.0) if is_scheduled else 0.9
        ahead = jax.tree.map(lambda p, v: p + mu * v, p, v)
        v = jax.tree.map(lambda v, g: mu * v - 0.1 * g, v, gradient(ahead, x, y))
        return jax.tree.map(jnp.add, p, v), v, n + 1

    args = (LAYERS, LAYERS, f32(), f32(64, 24), i32(64))
    found = Model(step=step, args=args, names=("p", "v", "n", "x", "y"), num_state=3).classes()
    for one in found.arguments[:3]:
        assert one.role == Role.PARAMETER
    for place, one in enumerate(found.arguments[3:6]):
        assert (one.role, one.of) == (Role.MOMENT, place)


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
def test_a_target_network_is_a_copy_also_where_its_gradient_is_jitted(outer: Any) -> None:
    def distance(p: Any, target: Any, x: Any) -> Any:
        return jnp.mean((network(p, x) - network(target, x)) ** 2)

    def step(p: Any, target: Any, x: Any) -> Any:
        p = descended(lambda p, *_: outer(distance)(p, target, x), p)[0]
        return p, jax.tree.map(lambda a, b: 0.99 * a + 0.01 * b, target, p)

    found = Model(
        step=step, args=(LAYERS, LAYERS, f32(64, 24)), names=("p", "target", "x"), num_state=2
    ).classes()
    assert [one.role for one in found.arguments[:6]] == [Role.PARAMETER] * 3 + [Role.COPY] * 3
