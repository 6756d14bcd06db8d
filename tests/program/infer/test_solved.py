"""Steps that solve linear systems: in the loss, in an optimizer, or without any gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.infer.nouns import CautionKind, Role, StepClasses
from automesh.program.infer.search.layout import lay_out
from tests.support.infer_models import XENT, Model, argument, f32, i32, stencil

B, T = 64, 50


def logical(found: StepClasses) -> list[str]:
    return [one.name for one in lay_out(found, num_devices=8, script="train.py").logical]


def test_a_filter_that_solves_in_each_turn_has_a_batch_and_a_time() -> None:
    def loss(p: Any, y: Any) -> Any:
        def turn(carry: Any, now: Any) -> Any:
            m, cov = p["A"] @ carry[0], p["A"] @ carry[1] @ p["A"].T + jnp.eye(8)
            spread = p["C"] @ cov @ p["C"].T + jnp.eye(4)
            gain = jnp.linalg.solve(spread, p["C"] @ cov).T
            rest = now - p["C"] @ m
            return (m + gain @ rest, cov - gain @ p["C"] @ cov), rest @ rest

        return jax.lax.scan(turn, (jnp.zeros(8), jnp.eye(8)), y)[1].sum()

    def step(p: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jax.vmap(loss, (None, 0))(p, y).mean())(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads), value

    p = {"A": f32(8, 8), "C": f32(4, 8)}
    found = Model(step=step, args=(p, f32(B, T, 4)), names=("p", "y"), num_state=1).classes()
    y = argument(found, "y")
    assert (y.role, y.dims[:2]) == (Role.DATA, ("batch", "time"))
    assert CautionKind.UNKNOWN_OPERATION not in {one.kind for one in found.cautions}
    # Matrices are solved along what is seen, and not along the state.
    assert "solved" in found.named(y.dims[2]).whole
    assert not found.named(argument(found, "p['A']").dims[0]).whole


@pytest.mark.parametrize("how", ["inverse", "factors"])
def test_statistics_that_gradients_are_multiplied_with_are_moments(how: str) -> None:
    def turned(left: Any, right: Any, grad: Any) -> Any:
        left, right = left + jnp.eye(len(left)), right + jnp.eye(len(right))
        if how == "inverse":
            return jnp.linalg.inv(left) @ grad @ jnp.linalg.inv(right)
        solve = jax.scipy.linalg.cho_solve
        factors = jax.scipy.linalg.cho_factor(left), jax.scipy.linalg.cho_factor(right)
        return solve(factors[1], solve(factors[0], grad).T).T

    def step(p: Any, ins: Any, outs: Any, x: Any, y: Any) -> Any:
        def loss(p: Any, zeros: Any) -> Any:
            hidden = jax.nn.relu(x @ p[0] + zeros[0])
            return XENT(hidden @ p[1] + zeros[1], y).mean(), hidden

        zeros = jnp.zeros((B, 256)), jnp.zeros((B, 10))
        taken = jax.value_and_grad(loss, (0, 1), has_aux=True)(p, zeros)
        (value, hidden), (grads, slopes) = taken
        ins = [0.9 * m + a.T @ a for m, a in zip(ins, (x, hidden), strict=True)]
        outs = [0.9 * m + g.T @ g for m, g in zip(outs, slopes, strict=True)]
        p = [w - turned(*m) for w, m in zip(p, zip(ins, outs, grads, strict=True), strict=True)]
        return p, ins, outs, value

    sizes = (784, 256, 10)
    squares = [f32(size, size) for size in sizes]
    p = [f32(784, 256), f32(256, 10)]
    found = Model(
        step=step,
        args=(p, squares[:2], squares[1:], f32(B, 784), i32(B)),
        names=("p", "ins", "outs", "x", "y"),
        num_state=3,
    ).classes()
    roles = {one.name: one.role for one in found.arguments}
    assert {roles[f"{name}[{at}]"] for name in ("ins", "outs") for at in (0, 1)} == {Role.MOMENT}
    assert argument(found, "p[0]").dims[0] == "features"
    assert not any(one.whole for one in found.classes)
    assert {"features", argument(found, "p[1]").dims[0]} <= set(logical(found))
    text = "".join(c.text for c in found.cautions if c.kind == CautionKind.OPTIMIZER_MATRICES)
    assert "factorizes 4 matrices (of up to 784 rows)" in text


def test_factors_that_are_solved_for_in_turns_are_split_like_what_they_explain() -> None:
    def step(users: Any, items: Any, ratings: Any) -> Any:
        def solved(rows: Any, seen: Any) -> Any:
            return jnp.linalg.solve(rows.T @ rows + jnp.eye(16), rows.T @ seen)

        users = jax.vmap(solved, (None, 0))(items, ratings)
        items = jax.vmap(solved, (None, 1))(users, ratings)
        return users, items, jnp.mean((users @ items.T - ratings) ** 2)

    found = Model(
        step=step,
        args=(f32(512, 16), f32(256, 16), f32(512, 256)),
        names=("users", "items", "ratings"),
        num_state=2,
    ).classes()
    roles = [one.role for one in found.arguments]
    assert roles == [Role.STATISTIC, Role.STATISTIC, Role.DATA]
    rows, columns = argument(found, "ratings").dims
    assert argument(found, "users").dims[0] == rows
    assert argument(found, "items").dims[0] == columns
    assert logical(found) == [rows, columns]
    layout = lay_out(found, num_devices=8, script="train.py")
    assert layout.arguments[2].split == ((rows,), (columns,))
    assert CautionKind.OPTIMIZER_MATRICES not in {one.kind for one in found.cautions}


def test_a_simulation_without_a_gradient_is_split_in_space() -> None:
    layout = lay_out(stencil().classes(), num_devices=8, script="train.py")
    assert layout.axes == ("tp",)
    assert layout.arguments[0].split == (("space2",), ("space",))
