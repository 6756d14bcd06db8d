"""Tables of positions, which are no vocabulary, in the ways in which models read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from automesh.program.infer.nouns import CautionKind, StepClasses
from tests.support.infer_models import Model, argument, attend, descended, f32, i32, searched

B, T, WIDTH, VOCAB, LONGEST = 8, 32, 64, 96, 128


def language(how: str) -> StepClasses:
    """A language model whose table of positions is longer than its sequences."""

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            if how == "arange":
                places = p["pos"][jnp.arange(T)]
            elif how == "slice":
                places = p["pos"][:T]
            else:
                _, places = jax.lax.scan(lambda _, i: (None, p["pos"][i]), None, jnp.arange(T))
            h = p["embed"][x] + places
            h = h + attend(h, h, p) @ p["o"]
            scores = jax.nn.log_softmax(h @ p["out"])
            return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))

        return descended(lambda p: loss(p), p)

    p = {name: f32(WIDTH, WIDTH) for name in "qkvo"}
    p |= {"embed": f32(VOCAB, WIDTH), "out": f32(WIDTH, VOCAB), "pos": f32(LONGEST, WIDTH)}
    names = ("p", "x", "y")
    return Model(step=step, args=(p, i32(B, T), i32(B, T)), names=names, num_state=1).classes()


@pytest.mark.parametrize("how", ["arange", "slice", "scan"])
def test_a_table_that_is_read_in_order_has_positions(how: str) -> None:
    found = language(how)
    assert argument(found, "p['pos']").dims == ("positions", "embed")
    assert argument(found, "p['embed']").dims == ("vocab", "embed")
    assert argument(found, "p['out']").dims == ("embed", "vocab")
    # Nobody splits them over tp.
    assert "positions" not in searched(found)
    assert {"embed", "heads", "vocab"} <= set(searched(found))


def test_a_table_of_biases_that_a_constant_chooses_from_has_positions() -> None:
    near = jnp.asarray(np.random.RandomState(0).randint(0, 49, (T, T)))

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x @ p["in"]
            q, k, v = (jnp.einsum("bte,ehd->bthd", h, p[name]) for name in "qkv")
            weights = jnp.einsum("bthd,bshd->bhts", q, k) + p["bias"][near].transpose(2, 0, 1)
            h = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(weights), v).reshape(B, T, WIDTH)
            scores = jax.nn.log_softmax(h.mean(1) @ p["out"])
            return -jnp.mean(jnp.take_along_axis(scores, y[:, None], -1))

        return descended(loss, p)

    p = {name: f32(WIDTH, 4, 16) for name in "qkv"}
    p |= {"bias": f32(49, 4), "in": f32(48, WIDTH), "out": f32(WIDTH, 10)}
    args = (p, f32(B, T, 48), i32(B))
    found = Model(step=step, args=args, names=("p", "x", "y"), num_state=1).classes()
    assert argument(found, "p['bias']").dims == ("positions", "heads")


def test_patches_of_which_some_are_chosen_are_a_sequence() -> None:
    def step(p: Any, x: Any, key: Any) -> Any:
        def loss(p: Any) -> Any:
            h = x @ p["patch"] + p["pos"]
            order = jnp.argsort(jax.random.uniform(key, (B, T)), 1)
            some = jnp.take_along_axis(h, order[:, : T // 4, None], 1)
            some = some + attend(some, some, p) @ p["o"]
            return jnp.mean(some**2)

        return descended(loss, p)

    p = {name: f32(WIDTH, WIDTH) for name in "qkvo"}
    p |= {"patch": f32(48, WIDTH), "pos": f32(T, WIDTH)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    args = (p, f32(B, T, 48), key)
    found = Model(step=step, args=args, names=("p", "x", "key"), num_state=1).classes()
    assert argument(found, "x").dims == ("batch", "sequence", "features")
    assert argument(found, "p['pos']").dims[0] == "sequence"


def test_sines_and_cosines_of_positions_cut_no_width_into_halves() -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            places = jnp.arange(T)[:, None] * jnp.exp(-jnp.arange(WIDTH // 2) / WIDTH)
            h = x @ p["in"] + jnp.concatenate([jnp.sin(places), jnp.cos(places)], -1)
            h = h + attend(h, h, p) @ p["o"]
            return jnp.mean((h + jax.nn.gelu(h @ p["up"]) @ p["down"]) ** 2)

        return descended(loss, p)

    p = {name: f32(WIDTH, WIDTH) for name in "qkvo"}
    p |= {"down": f32(256, WIDTH), "in": f32(80, WIDTH), "up": f32(WIDTH, 256)}
    found = Model(step=step, args=(p, f32(B, T, 80)), names=("p", "x"), num_state=1).classes()
    assert argument(found, "p['up']").dims == ("embed", "mlp")
    assert CautionKind.PACKED not in {one.kind for one in found.cautions}
    assert "embed" in searched(found)


def test_the_labels_beside_a_router_choose_from_the_vocabulary() -> None:
    experts, capacity = 4, 96

    def step(p: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            h = p["embed"][x].reshape(-1, WIDTH)
            gate = jax.nn.softmax(h @ p["router"])
            chosen = jnp.argmax(gate, -1)
            order = jnp.argsort(chosen)
            sorted_ = chosen[order]
            place = jnp.arange(B * T) - jnp.searchsorted(sorted_, jnp.arange(experts))[sorted_]
            inside = jnp.zeros((experts, capacity, WIDTH)).at[sorted_, place].set(h[order])
            inside = jax.nn.relu(jnp.einsum("ecd,edf->ecf", inside, p["up"]))
            back = jnp.einsum("ecf,efd->ecd", inside, p["down"])[sorted_, place]
            h = h + jnp.zeros_like(h).at[order].add(back * gate.max(-1)[order, None])
            scores = jax.nn.log_softmax((h @ p["out"]).reshape(B, T, VOCAB))
            return -jnp.mean(jnp.take_along_axis(scores, y[..., None], -1))

        return descended(loss, p)

    p = {
        "down": f32(experts, 128, WIDTH),
        "embed": f32(VOCAB, WIDTH),
        "out": f32(WIDTH, VOCAB),
        "router": f32(WIDTH, experts),
        "up": f32(experts, WIDTH, 128),
    }
    args = (p, i32(B, T), i32(B, T))
    found = Model(step=step, args=args, names=("p", "x", "y"), num_state=1).classes()
    assert argument(found, "p['out']").dims == ("embed", "vocab")
    assert argument(found, "p['up']").dims == ("expert", "embed", "mlp")


def test_edges_whose_messages_are_only_summed_up_are_what_is_split() -> None:
    nodes, edges = 256, 1024

    def step(p: Any, x: Any, senders: Any, receivers: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            degree = jax.ops.segment_sum(jnp.ones(edges), receivers, nodes) + 1
            h = x
            for w in p:
                sent = (h @ w)[senders] / jnp.sqrt(degree[senders] * degree[receivers])[:, None]
                h = jax.nn.relu(jax.ops.segment_sum(sent, receivers, nodes))
            scores = jax.nn.log_softmax(h)
            return -jnp.mean(jnp.take_along_axis(scores, y[:, None], -1))

        return descended(loss, p)

    args = ([f32(128, 64), f32(64, 16)], f32(nodes, 128), i32(edges), i32(edges), i32(nodes))
    names = ("p", "x", "senders", "receivers", "y")
    found = Model(step=step, args=args, names=names, num_state=1).classes()
    assert [(one.name, one.size) for one in found.batches] == [("edges", edges)]
    assert argument(found, "x").dims[0] == argument(found, "y").dims[0] == "nodes"
    assert searched(found)[0] == "edges"
