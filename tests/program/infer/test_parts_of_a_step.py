"""Loops that are a part of one step, layers that a loop takes by their number, and what they are
taken for."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import CautionKind, Role
from tests.support.infer_models import XENT, Model, argument, descended, f32, i32, searched

B, T, WIDTH = 64, 16, 32


@pytest.mark.parametrize("how", ["samples", "attack", "critic"])
def test_a_loop_before_another_gradient_is_a_part_of_one_step(how: str) -> None:
    def energy(p: Any, x: Any) -> Any:
        return (jax.nn.silu(x @ p["up"]) @ p["down"])[:, 0]

    def step(p: Any, critic: Any, x: Any) -> Any:
        def turn(critic: Any, _: Any) -> Any:
            made = jnp.tanh(x @ p["up"] @ critic["up"].T)
            return descended(lambda critic: jnp.mean(energy(critic, made)), critic)

        def better(made: Any, _: Any) -> Any:
            return made - 0.1 * jax.grad(lambda s: energy(p, x + s).sum())(made), None

        if how == "critic":
            critic, _ = jax.lax.scan(turn, critic, None, 5)
            p, value = descended(lambda p: -jnp.mean(energy(critic, energy(p, x)[:, None] * x)), p)
            return p, critic, value
        start = jnp.zeros_like(x) if how == "attack" else x
        made = jax.lax.stop_gradient(jax.lax.scan(better, start, None, 7)[0])
        p, value = descended(lambda p: jnp.mean(energy(p, x) - energy(p, made)), p)
        return p, critic, value

    p = {"down": f32(64, 1), "up": f32(WIDTH, 64)}
    args = (p, p, f32(B, WIDTH))
    found = Model(step=step, args=args, names=("p", "critic", "x"), num_state=2).classes()
    assert CautionKind.MANY_STEPS not in {one.kind for one in found.cautions}


@pytest.mark.parametrize("how", ["index", "slice"])
def test_layers_that_a_loop_takes_by_their_number_are_one_class(how: str) -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            def layer(number: Any, h: Any) -> Any:
                def take(w: Any) -> Any:
                    if how == "index":
                        return w[number]
                    return jax.lax.dynamic_index_in_dim(w, number, keepdims=False)

                one = jax.tree.map(take, p["layers"])
                return h + jnp.tanh(h * one["norm"] @ one["up"]) @ one["down"]

            return jnp.mean(jax.lax.fori_loop(0, 4, layer, x @ p["in"]) ** 2)

        return descended(loss, p)

    layers = {"down": f32(4, 128, WIDTH), "norm": f32(4, WIDTH), "up": f32(4, WIDTH, 128)}
    p = {"in": f32(48, WIDTH), "layers": layers}
    found = Model(step=step, args=(p, f32(B, 48)), names=("p", "x"), num_state=1).classes()
    assert argument(found, "p['layers']['up']").dims[0] == "layers"
    assert argument(found, "p['layers']['norm']").dims[0] == "layers"
    assert "layers" not in searched(found)


def test_a_table_of_one_column_has_the_rows_of_the_table_beside_it() -> None:
    fields, rows = 4, 4096
    begins = jnp.arange(fields) * 1024

    def step(p: Any, numbers: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            places = numbers + begins
            embedded = p["embed"][places]
            score = p["bias"][places][..., 0].sum(1) + embedded.reshape(B, -1) @ p["out"]
            return jnp.mean((score - y) ** 2)

        return descended(loss, p)

    p = {"bias": f32(rows, 1), "embed": f32(rows, 16), "out": f32(fields * 16)}
    args = (p, i32(B, fields), f32(B))
    found = Model(step=step, args=args, names=("p", "numbers", "y"), num_state=1).classes()
    assert argument(found, "p['bias']").dims[0] == argument(found, "p['embed']").dims[0] == "vocab"


def test_slots_of_experts_are_no_gradients_of_examples() -> None:
    experts, slots = 4, 8

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x @ p["in"]
            weights = jax.nn.softmax(jnp.einsum("btd,esd->btes", h, p["slots"]), 1)
            inside = jnp.einsum("btd,btes->besd", h, weights)
            inside = jax.nn.gelu(jnp.einsum("besd,edf->besf", inside, p["up"]))
            back = jnp.einsum("besf,efd->besd", inside, p["down"])
            h = h + jnp.einsum("besd,btes->btd", back, weights)
            return XENT(h.mean(1) @ p["out"], y).mean()

        return descended(loss, p)

    p = {
        "down": f32(experts, 128, WIDTH),
        "in": f32(48, WIDTH),
        "out": f32(WIDTH, 10),
        "slots": f32(experts, slots, WIDTH),
        "up": f32(experts, WIDTH, 128),
    }
    args = (p, f32(B, T, 48), i32(B))
    found = Model(step=step, args=args, names=("p", "x", "y"), num_state=1).classes()
    assert CautionKind.PER_EXAMPLE_GRADIENTS not in {one.kind for one in found.cautions}
    # What rows have, and parameters sum over, is no sequence of an attention.
    assert argument(found, "x").dims == ("batch", "sequence", "features")


def test_data_that_a_jitted_loss_and_its_gradient_hold_are_one_array() -> None:
    """The loss and its gradient are two programs inside of the step, and each has the data as its
    own constant: a matrix of the loss was taken for a frozen one, as nothing told that its gradient
    has its dimensions."""
    x, y = (np.ones((B, size), np.float32) for size in (WIDTH, 8))

    @jax.jit
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.asarray(y) - (x @ p["kernel"] + p["bias"])) ** 2)

    p = {"bias": jnp.zeros(8), "kernel": jnp.zeros((WIDTH, 8))}
    traced = jax.jit(jax.value_and_grad(loss)).trace(p)
    found = classes_of(traced.jaxpr, carried={}, names=("p['bias']", "p['kernel']"))
    roles = {one.name: one.role for one in found.arguments}
    assert roles == {"p['bias']": Role.PARAMETER, "p['kernel']": Role.PARAMETER}
    (batch,) = found.batches
    assert batch.size == B
