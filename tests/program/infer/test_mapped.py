"""Steps with a `shard_map` inside: the dimensions of one device's part are those of the whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from automesh.program.infer.nouns import StepClasses
from tests.support.infer_models import Model, argument, descended, f32

BATCH, EMBED, MLP = 16, 32, 128


def dims(found: StepClasses) -> dict[str, tuple[str, ...]]:
    return {one.name: one.dims for one in found.arguments}


def classes(loss: Any, mesh: Any, *names: str, shapes: tuple[tuple[int, ...], ...]) -> StepClasses:
    *weights, x = shapes

    def step(params: Any, x: Any) -> Any:
        return descended(partial(loss, mesh), params, x)

    params = {name: f32(*shape) for name, shape in zip(names, weights, strict=True)}
    model = Model(step=step, args=(params, f32(*x)), names=("p", "x"), num_state=1)
    return model.classes()


def mesh_of(data: int, model: int) -> AbstractMesh:
    return AbstractMesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def perceptron(mesh: Any, p: Any, x: Any) -> Any:
    """Columns, then rows, over `model`; the weights are also kept in parts over `data`."""

    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data", "model"), P("model", "data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    def block(up: Any, down: Any, x: Any) -> Any:
        up = jax.lax.all_gather(up, "data", axis=0, tiled=True)
        down = jax.lax.all_gather(down, "data", axis=1, tiled=True)
        parts = jax.nn.gelu(x @ up) @ down
        own = jax.lax.psum_scatter(parts, "model", scatter_dimension=1, tiled=True)
        return x + jax.lax.all_gather(own, "model", axis=1, tiled=True)

    return jnp.mean(block(p["up"], p["down"], x) ** 2)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (4, 2)])
def test_parts_of_devices_are_joined_to_the_whole(sizes: tuple[int, int]) -> None:
    found = classes(
        perceptron, mesh_of(*sizes), "up", "down",
        shapes=((EMBED, MLP), (MLP, EMBED), (BATCH, EMBED)),
    )  # fmt: skip
    names = dims(found)
    embed, mlp = names["p['up']"]
    assert embed != mlp
    assert names["p['down']"] == (mlp, embed)
    assert names["x"] == ("batch", embed)
    sizes_by = {one.name: one.size for one in found.classes}
    assert {name: sizes_by[name] for name in (embed, mlp)} == {embed: EMBED, mlp: MLP}


def exchange(mesh: Any, p: Any, x: Any) -> Any:
    """Heads instead of the sequence are split for attention, and back (Ulysses)."""

    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data", "model")),
        out_specs=P("data", "model"), check_vma=False,
    )  # fmt: skip
    def block(w: Any, x: Any) -> Any:
        q = jnp.einsum("bsd,dhk->bshk", x, w)
        q = jax.lax.all_to_all(q, "model", split_axis=2, concat_axis=1, tiled=True)
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, q))
        out = jnp.einsum("bhst,bthk->bshk", scores, q)
        out = jax.lax.all_to_all(out, "model", split_axis=1, concat_axis=2, tiled=True)
        return jnp.einsum("bshk,dhk->bsd", jax.lax.ppermute(out, "data", [(0, 1), (1, 0)]), w)

    return jnp.mean((x - block(p["w"], x)) ** 2)


@pytest.mark.parametrize("sizes", [(2, 1), (2, 4)])
def test_an_exchange_of_heads_for_the_sequence_keeps_both(sizes: tuple[int, int]) -> None:
    found = classes(exchange, mesh_of(*sizes), "w", shapes=((EMBED, 8, 16), (BATCH, 64, EMBED)))
    names = dims(found)
    assert names["p['w']"][1] == "heads"
    assert names["x"] == ("batch", "sequence", names["p['w']"][0])


def test_heads_that_are_as_many_as_devices_stay_heads() -> None:
    """Each device has one head, for which it needs no dimension."""
    heads, size = 4, 16

    def loss(mesh: Any, p: Any, x: Any) -> Any:
        def attend(w: Any, x: Any) -> Any:
            q = x @ w
            scores = jax.nn.softmax(jnp.einsum("bsk,btk->bst", q, q))
            return jnp.einsum("bst,btk->bsk", scores, q)

        split = partial(jax.shard_map, mesh=mesh, check_vma=False)
        q = (x @ p["w"]).reshape(*x.shape[:2], heads, size)
        own = split(
            attend, in_specs=(P(None, "model"), P("data")), out_specs=P("data", None, "model")
        )
        mixed = own(p["w"], x).reshape(q.shape) * jax.nn.silu(q)
        return jnp.mean((jnp.einsum("bshk,hkd->bsd", mixed, p["out"]) - x) ** 2)

    found = classes(
        loss, mesh_of(2, 4), "out", "w",
        shapes=((heads, size, EMBED), (EMBED, heads * size), (BATCH, 64, EMBED)),
    )  # fmt: skip
    names = dims(found)
    assert len({*names["p['out']"], ""}) == 4
    sizes_by = {one.name: one.size for one in found.classes}
    assert [sizes_by[name] for name in names["p['out']"]] == [heads, size, EMBED]
    assert names["p['w']"][1] == names["p['out']"][0]


def test_experts_inside_of_a_shard_map_are_experts() -> None:
    """Tokens are sorted by their experts, whose biases are looked up at an offset."""
    experts, mesh = 16, mesh_of(1, 1)

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

    found = classes(
        loss, mesh, "bias", "router", "up",
        shapes=((experts, EMBED), (EMBED, experts), (experts, EMBED, EMBED), (BATCH, EMBED)),
    )  # fmt: skip
    names = dims(found)
    assert names["p['router']"][1] == names["p['up']"][0] == names["p['bias']"][0] == "expert"
    assert argument(found, "x").dims[0] == "batch"


def test_experts_that_are_chosen_in_groups_are_experts() -> None:
    groups, experts, rank = 4, 16, 24

    def loss(_mesh: Any, p: Any, x: Any) -> Any:
        scores = jax.nn.sigmoid(x @ p["router"])
        grouped = scores.reshape(*scores.shape[:-1], groups, -1)
        _, kept = jax.lax.top_k(jnp.max(grouped, -1), 2)
        mask = jnp.sum(jax.nn.one_hot(kept, groups), -2)
        scores = (grouped * mask[..., None]).reshape(scores.shape)
        weights, chosen = jax.lax.top_k(scores, 2)
        mixing = jnp.sum(jax.nn.one_hot(chosen, experts) * weights[..., None], -2)
        inside = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, p["up"]))
        return jnp.mean((jnp.einsum("bsef,efd,bse->bsd", inside, p["down"], mixing) - x) ** 2)

    found = classes(
        loss, None, "down", "router", "up",
        shapes=(
            (experts, rank, EMBED), (EMBED, experts), (experts, EMBED, rank), (BATCH, 8, EMBED),
        ),
    )  # fmt: skip
    names = dims(found)
    assert names["p['router']"][1] == names["p['up']"][0] == names["p['down']"][0] == "expert"


def test_a_rotation_of_neighbours_leaves_the_size_of_a_head_its_name() -> None:
    """Each pair of neighbours is rotated, and put together again (as in Llama 4)."""

    def rotate(x: Any) -> Any:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        angles = jnp.arange(x.shape[1])[:, None, None] * jnp.ones(pairs.shape[-2])
        one, two = pairs[..., 0], pairs[..., 1]
        turned = [one * jnp.cos(angles) - two * jnp.sin(angles), two * jnp.cos(angles) + one]
        return jnp.stack(turned, -1).reshape(x.shape)

    def loss(_mesh: Any, p: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", rotate(q), rotate(k)))
        out = jnp.einsum("bhst,bthk,hkd->bsd", scores, v, p["out"])
        return jnp.mean((out - x) ** 2)

    found = classes(
        loss, None, "k", "out", "q", "v",
        shapes=((EMBED, 4, 6), (4, 6, EMBED), (EMBED, 4, 6), (EMBED, 4, 6), (BATCH, 64, EMBED)),
    )  # fmt: skip
    names = dims(found)
    assert names["p['q']"][2].startswith("head_dim")
    assert names["p['q']"] == names["p['k']"]
    assert names["x"][:2] == ("batch", "sequence")


def test_a_window_that_slides_along_tokens_leaves_them_a_sequence() -> None:
    def loss(_mesh: Any, p: Any, x: Any) -> Any:
        inside = x @ p["up"]
        slid = jax.lax.conv_general_dilated(
            inside, p["kernel"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=MLP,
        )  # fmt: skip
        return jnp.mean((slid @ p["down"] - x) ** 2)

    found = classes(
        loss, None, "down", "kernel", "up",
        shapes=((MLP, EMBED), (4, 1, MLP), (EMBED, MLP), (BATCH, 64, EMBED)),
    )  # fmt: skip
    assert dims(found)["x"][:2] == ("batch", "sequence")
