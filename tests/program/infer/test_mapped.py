"""Steps with a `shard_map` on a mesh of one device: what each device does is what the step does."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from automesh.program.infer.nouns import StepClasses
from tests.support.infer_models import Model, descended, f32, i32

BATCH, EMBED, MLP, VOCAB = 16, 32, 128, 96


def mesh_of(data: int, model: int) -> AbstractMesh:
    return AbstractMesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def classes(loss: Any, params: dict[str, Any], x: Any, mesh: Any) -> StepClasses:
    def step(params: Any, x: Any) -> Any:
        return descended(partial(loss, mesh), params, x)

    found = Model(step=step, args=(params, x), names=("p", "x"), num_state=1).classes()
    by_name = {one.name: one for one in found.classes}
    for array in found.arguments:
        for name, size in zip(array.dims, array.shape, strict=True):
            assert not name or size % by_name[name].size == 0, (array.name, name)
    return found


def dims(found: StepClasses) -> dict[str, tuple[str, ...]]:
    return {one.name: one.dims for one in found.arguments}


def perceptron(mesh: Any, p: Any, x: Any) -> Any:
    """Columns, then rows, over `model`; the weights are also kept in parts over `data`."""

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data", "model"), P("model", "data"), P("data")),
        out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    def block(up: Any, down: Any, x: Any) -> Any:
        up = jax.lax.all_gather(up, "data", axis=0, tiled=True)
        down = jax.lax.all_gather(down, "data")[0]
        parts = jax.lax.psum(jax.nn.gelu(x @ up) @ down, "model")
        own = jax.lax.psum_scatter(parts, "model", scatter_dimension=1, tiled=True)
        own = jax.lax.psum_scatter(own[None], "data")
        return x + jax.lax.pmean(jax.lax.ppermute(own, "data", [(0, 0)]), "model")

    return jnp.mean(block(p["up"], p["down"], x) ** 2)


WEIGHTS = {"down": f32(MLP, EMBED), "up": f32(EMBED, MLP)}


def test_dimensions_go_through_what_one_device_does() -> None:
    names = dims(classes(perceptron, WEIGHTS, f32(BATCH, EMBED), mesh_of(1, 1)))
    embed, mlp = names["p['up']"]
    assert embed != mlp
    assert names["p['down']"] == (mlp, embed)
    assert names["x"] == ("batch", embed)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 4), (2, 4)])
def test_of_parts_of_several_devices_nothing_is_said(sizes: tuple[int, int]) -> None:
    """A part may be of another array or of all: sizes of classes stay those of the arrays."""

    def loss(mesh: Any, p: Any, x: Any) -> Any:
        split = jax.shard_map(
            lambda up, down, x: jax.lax.psum(jax.nn.relu(x @ up) @ down, "model"),
            mesh=mesh, in_specs=(P(None, "model"), P("model"), P()), out_specs=P(),
        )  # fmt: skip
        return jnp.mean((split(p["up"], p["down"], x) - x) ** 2)

    found = classes(loss, WEIGHTS, f32(BATCH, EMBED), mesh_of(*sizes))
    (up,) = [one for one in found.arguments if one.name == "p['up']"]
    by_name = {one.name: one for one in found.classes}
    assert [by_name[name].parts for name in up.dims] == [1, 1]


def test_an_exchange_of_heads_for_the_sequence_keeps_both() -> None:
    def loss(mesh: Any, p: Any, x: Any) -> Any:
        @partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P("data", "model")),
            out_specs=P("data", "model"), check_vma=False,
        )  # fmt: skip
        def block(w: Any, x: Any) -> Any:
            q = jnp.einsum("bsd,dhk->bshk", x, w)
            q = jax.lax.all_to_all(q, "model", split_axis=2, concat_axis=1, tiled=True)
            scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, q))
            out = jnp.einsum("bhst,bthk->bshk", scores, q)
            out = jax.lax.all_to_all(out[None], "model", split_axis=0, concat_axis=0)
            return jnp.einsum("bshk,dhk->bsd", out[0], w)

        return jnp.mean((x - block(p["w"], x)) ** 2)

    found = classes(loss, {"w": f32(EMBED, 8, 16)}, f32(BATCH, 64, EMBED), mesh_of(1, 1))
    names = dims(found)
    assert names["p['w']"][1] == "heads"
    assert names["x"] == ("batch", "sequence", names["p['w']"][0])


def test_a_table_inside_has_a_vocabulary() -> None:
    def loss(mesh: Any, p: Any, x: Any) -> Any:
        look = jax.shard_map(
            lambda table, x: table[x], mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
        )
        return jnp.mean(jnp.tanh(look(p["table"], x) @ p["out"]) ** 2)

    found = classes(
        loss, {"out": f32(EMBED, 8), "table": f32(VOCAB, EMBED)}, i32(BATCH, 64), mesh_of(1, 1)
    )
    assert dims(found)["p['table']"] == ("vocab", "embed")


def test_experts_inside_are_experts() -> None:
    """Tokens are sorted by their experts, whose biases are looked up at an offset."""
    experts = 16

    def loss(mesh: Any, p: Any, x: Any) -> Any:
        scores = jax.nn.softmax(x @ p["router"])
        _, chosen = jax.lax.top_k(scores, 1)

        @partial(
            jax.shard_map, mesh=mesh, in_specs=(P("data"), P("model"), P("model"), P("data")),
            out_specs=P("data"), check_vma=False,
        )  # fmt: skip
        def send(x: Any, up: Any, bias: Any, chosen: Any) -> Any:
            first = jax.lax.axis_index("model") * up.shape[0]
            own = jnp.where(chosen[:, 0] >= first, chosen[:, 0] - first, 0)
            order = jnp.argsort(own)
            counts = jnp.bincount(own, length=up.shape[0])
            out = jax.lax.ragged_dot(x[order], up, counts) + bias[own[order]]
            return jax.lax.psum(out[jnp.argsort(order)], "model")

        sent = send(x, p["up"], p["bias"], chosen)
        return jnp.mean((sent * jnp.max(scores, -1, keepdims=True)) ** 2)

    params = {
        "bias": f32(experts, EMBED), "router": f32(EMBED, experts), "up": f32(experts, EMBED, EMBED)
    }  # fmt: skip
    names = dims(classes(loss, params, f32(BATCH, EMBED), mesh_of(1, 1)))
    assert names["p['router']"][1] == names["p['up']"][0] == names["p['bias']"][0] == "expert"
    assert names["x"][0] == "batch"
