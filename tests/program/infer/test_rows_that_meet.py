"""Rows of a batch that are chosen, moved or summed up before a network or behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.infer.nouns import CautionKind, StepClasses
from tests.support.infer_models import XENT, Model, argument, descended, f32, i32

VOCAB, WIDTH = 512, 32
TOKENS = {"embed": f32(VOCAB, WIDTH), "up": f32(WIDTH, 128), "down": f32(128, WIDTH)}


def found_of(loss: Any, params: Any, *data: Any, names: str) -> StepClasses:
    def step(p: Any, *data: Any) -> Any:
        return descended(loss, p, *data)

    return Model(
        step=step, args=(params, *data), names=("p", *names.split()), num_state=1
    ).classes()


def batches(found: StepClasses) -> dict[str, int]:
    return {one.name: one.size for one in found.batches}


def kinds(found: StepClasses) -> set[CautionKind]:
    return {one.kind for one in found.cautions}


@pytest.mark.parametrize("offsets", ["multiplied", "none"])
def test_masked_places_in_rows_that_lie_end_to_end_are_those_of_their_row(offsets: str) -> None:
    """Before, only the masked places were a batch, and each device computed the whole network."""

    def loss(p: Any, ids: Any, places: Any, labels: Any) -> Any:
        x = p["embed"][ids]
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        if offsets == "none":
            chosen = jnp.take_along_axis(x, places[..., None], 1).reshape(-1, WIDTH)
        else:
            flat = (places + jnp.arange(16)[:, None] * 64).reshape(-1)
            chosen = x.reshape(-1, WIDTH)[flat]
        return jnp.mean(XENT(chosen @ p["embed"].T, labels.reshape(-1)))

    found = found_of(loss, TOKENS, i32(16, 64), i32(16, 8), i32(16, 8), names="ids places labels")
    for name in ("ids", "places", "labels"):
        assert argument(found, name).dims[0] == "batch"
    assert argument(found, "p['embed']").dims == ("vocab", "embed")
    assert CautionKind.TIED in kinds(found)


def test_fields_that_share_a_table_leave_its_rows_together() -> None:
    """Their numbers have offsets, too, but the table is one of parameters."""

    def loss(p: Any, ids: Any, y: Any) -> Any:
        x = p["table"][ids + jnp.arange(8) * 100].reshape(64, -1)
        return jnp.mean(XENT(jax.nn.relu(x @ p["up"]) @ p["down"], y))

    params = {"table": f32(800, WIDTH), "up": f32(8 * WIDTH, 128), "down": f32(128, 10)}
    found = found_of(loss, params, i32(64, 8), i32(64), names="ids y")
    assert batches(found) == {"batch": 64}
    (name,) = {argument(found, "p['table']").dims[0]}
    assert {one.name: one.size for one in found.classes}[name] == 800


LAYERS = {"w1": f32(24, 128), "w2": f32(128, 96), "w3": f32(96, 10)}


def network(p: Any, x: Any) -> Any:
    return jax.nn.relu(jax.nn.relu(x @ p["w1"]) @ p["w2"]) @ p["w3"]


def mixed(p: Any, x: Any, y: Any) -> Any:
    z = network(p, 0.7 * x + 0.3 * x[::-1])
    return jnp.mean(0.7 * XENT(z, y) + 0.3 * XENT(z, y[::-1]))


def rolled(p: Any, x: Any, y: Any) -> Any:
    return jnp.mean(XENT(network(p, x + jnp.roll(x, 1, 0)), y))


def paired(p: Any, x: Any, y: Any) -> Any:
    z = network(p, x)
    return jnp.mean(XENT(z, y)) + jnp.mean((z[::2] - z[1::2]) ** 2)


def ranked(p: Any, x: Any, y: Any) -> Any:
    """The risks of those that live longer are summed up (Cox); all rows are sorted first."""
    order = jnp.argsort(-y)
    risk = network(p, x[order])[:, 0]
    return jnp.mean(y[order] * (risk - jax.lax.cumlogsumexp(risk)))


def normed(p: Any, x: Any, y: Any) -> Any:
    x = x + x[::-1]
    hidden = x @ p["w1"]
    hidden = jax.nn.relu((hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3))
    return jnp.mean(XENT(jax.nn.relu(hidden @ p["w2"]) @ p["w3"], y))


@pytest.mark.parametrize("loss", [mixed, rolled, paired, ranked, normed])
def test_rows_that_move_before_a_network_or_meet_behind_it_are_a_batch(loss: Any) -> None:
    """Before, nothing was a batch, though each row goes through the network alone."""
    y = f32(64) if loss is ranked else i32(64)
    found = found_of(loss, LAYERS, f32(64, 24), y, names="x y")
    assert batches(found) == {"batch": 64}
    assert argument(found, "x").dims[0] == argument(found, "y").dims[0] == "batch"
    assert not {CautionKind.NO_BATCH, CautionKind.GATHERS_DATA_SET} & kinds(found)


@pytest.mark.parametrize("where", ["between layers", "in a loop"])
def test_rows_that_meet_between_products_are_no_batch(where: str) -> None:
    """Points of a grid, each of which sees its neighbours."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        def layer(x: Any) -> Any:
            x = jnp.tanh(x @ p["w"])
            return x + jnp.roll(x, 1, 0)

        if where == "in a loop":
            x = jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=4)[0]
        else:
            x = layer(x) @ p["w"]
        return jnp.mean((x - y) ** 2)

    found = found_of(loss, {"w": f32(24, 24)}, f32(64, 24), f32(64, 24), names="x y")
    assert not found.batches


def test_rows_in_a_drawn_order_are_taken_from_a_data_set() -> None:
    def step(p: Any, key: Any, x: Any) -> Any:
        rows = jax.random.permutation(key, 256).reshape(4, 64)

        def turn(p: Any, rows: Any) -> Any:
            return descended(lambda p: jnp.mean(network(p, x[rows]) ** 2), p)

        p, losses = jax.lax.scan(turn, p, rows)
        return p, losses.mean()

    model = Model(
        step=step,
        args=(LAYERS, jax.ShapeDtypeStruct((2,), jnp.uint32), f32(256, 24)),
        names=("p", "key", "x"),
        num_state=1,
    )
    found = model.classes()
    assert batches(found) == {"batch": 64}
    assert argument(found, "x").dims[0] == "rows"


def bagged(p: Any, values: Any, rows: Any, x: Any, y: Any) -> Any:
    bags = jax.ops.segment_sum(p["embed"][values], rows, num_segments=64)
    hidden = jnp.concatenate([bags, x], 1)
    return jnp.mean(XENT(jax.nn.relu(hidden @ p["in"]) @ p["out"], y))


def passed(p: Any, values: Any, rows: Any, x: Any, y: Any) -> Any:
    """Edges, each with a message from one of the rows, which are nodes."""
    messages = x[values % 64] @ p["message"]
    nodes = jax.ops.segment_sum(messages, rows, num_segments=64)
    hidden = jnp.concatenate([nodes, x], 1)
    return jnp.mean(XENT(jax.nn.relu(hidden @ p["in"]) @ p["out"], y))


@pytest.mark.parametrize("loss", [bagged, passed])
def test_rows_with_a_bag_of_elements_each_are_a_batch_beside_these(loss: Any) -> None:
    """Before, such rows were nodes of a graph, and whole on each device."""
    params = {
        "embed": f32(VOCAB, WIDTH), "message": f32(24, WIDTH), "in": f32(WIDTH + 24, 128),
        "out": f32(128, 10),
    }  # fmt: skip
    found = found_of(
        loss, params, i32(1024), i32(1024), f32(64, 24), i32(64), names="values rows x y"
    )
    is_graph = loss is passed
    assert set(batches(found).values()) == ({1024} if is_graph else {64, 1024})
    names = {argument(found, name).dims[0] for name in ("rows", "x")}
    assert names == ({"edges", "nodes"} if is_graph else {"batch", "batch2"})
    assert (CautionKind.NO_BATCH in kinds(found)) == is_graph


@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("is_cut", [False, True])
def test_batches_that_are_put_end_to_end_are_split_as_a_whole(rows: int, *, is_cut: bool) -> None:
    """New rows and those of a memory. Before, only equal ones, or those that were taken apart."""

    def loss(p: Any, x: Any, y: Any, old: Any, before: Any) -> Any:
        z = network(p, jnp.concatenate([x, old]))
        if is_cut:
            return jnp.mean(XENT(z[:64], y)) + jnp.mean(XENT(z[64:], before))
        return jnp.mean(XENT(z, jnp.concatenate([y, before])))

    found = found_of(
        loss, LAYERS, f32(64, 24), i32(64), f32(rows, 24), i32(rows), names="x y old before"
    )
    names = [argument(found, name).dims[0] for name in ("x", "y", "old", "before")]
    assert set(names) <= batches(found).keys()
    assert names[:1] * 2 == names[:2]
    assert names[2:3] * 2 == names[2:]
    assert CautionKind.BATCH_INSIDE not in kinds(found)
    said = [one.text for one in found.cautions if one.kind is CautionKind.STACKED_BATCHES]
    assert [("taken apart" in text) for text in said] == [is_cut][: rows == 64]


@pytest.mark.parametrize("order", ["apart", "side by side"])
def test_rows_in_groups_are_told_with_how_many_devices_split_them(order: str) -> None:
    """As for the standard deviation in groups of a discriminator's images."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        hidden = jax.nn.relu(x @ p["w1"])
        if order == "apart":
            spread = jnp.tile(hidden.reshape(4, 16, -1).var(0), (4, 1))
        else:
            spread = jnp.repeat(hidden.reshape(16, 4, -1).var(1), 4, 0)
        return jnp.mean(XENT(jax.nn.relu((hidden + spread) @ p["w2"]) @ p["w3"], y))

    found = found_of(loss, LAYERS, f32(64, 24), i32(64), names="x y")
    said = [one.text for one in found.cautions if one.kind is CautionKind.GROUPED_BATCH]
    if order == "apart":
        assert batches(found) == {"batch": 4}
        assert "the 64 rows of x as 4 times 16: at most 4 devices" in said[0]
    else:
        assert batches(found) == {"batch": 16}
        assert not said


def test_a_batch_inside_of_rows_that_lie_behind_others_is_told() -> None:
    """Queries of an episode behind its support: each query is compared with all classes."""

    def loss(p: Any, support: Any, query: Any) -> Any:
        rows = jnp.concatenate([support.reshape(-1, 24), query.reshape(-1, 24)])
        made = network(p, rows)
        centers = made[:64].reshape(16, 4, -1).mean(1)
        scores = -((made[64:, None] - centers) ** 2).sum(-1).reshape(16, 8, 16)
        labels = jnp.broadcast_to(jnp.arange(16)[:, None], (16, 8))
        return jnp.mean(XENT(scores, labels))

    found = found_of(loss, LAYERS, f32(16, 4, 24), f32(16, 8, 24), names="support query")
    assert batches(found) == {"batch": 8}
    (text,) = [one.text for one in found.cautions if one.kind is CautionKind.INNER_BATCH]
    assert "the inner part of 128 rows" in text


def test_rows_beside_those_some_places_further_are_one_batch() -> None:
    """Before, parts of the positions, which are constants, cut the batch."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        scores, other = network(p, x)[:, 0], jnp.roll(jnp.arange(64), 7)
        return jnp.mean(jax.nn.softplus((scores[other] - scores) * jnp.sign(y - y[other])))

    found = found_of(loss, LAYERS, f32(64, 24), f32(64), names="x y")
    assert batches(found) == {"batch": 64}
    assert [one.parts for one in found.batches] == [64]


def test_rows_that_are_counted_are_no_edges() -> None:
    """`jnp.unique` counts, and adds whole numbers into places."""

    def loss(p: Any, ids: Any, y: Any) -> Any:
        known, places = jnp.unique(ids.reshape(-1), size=256, fill_value=0, return_inverse=True)
        x = p["embed"][known][places.reshape(ids.shape)].mean(1)
        return jnp.mean(XENT(jax.nn.relu(x @ p["up"]) @ p["down"], y))

    found = found_of(loss, TOKENS, i32(64, 8), i32(64), names="ids y")
    assert batches(found) == {"batch": 64}
    assert argument(found, "y").dims == ("batch",)
    assert CautionKind.NO_BATCH not in kinds(found)


def test_rows_that_are_summed_up_for_each_class_are_no_edges() -> None:
    """Each row is compared with the middle of its class (center loss), for which nothing is given.
    Before, the batch was called edges, and graphs were said to lie end to end."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        z = network(p, x)
        number = jax.ops.segment_sum(jnp.ones(64), y, num_segments=16)
        middle = jax.ops.segment_sum(z, y, num_segments=16) / (number[:, None] + 1)
        return jnp.mean((z - middle[y]) ** 2)

    found = found_of(loss, LAYERS, f32(64, 24), i32(64), names="x y")
    assert batches(found) == {"batch": 64}
    assert CautionKind.NO_BATCH not in kinds(found)


def test_edges_between_rows_of_two_tables_stay_edges() -> None:
    """Nothing but tables is given for users and products, which are the nodes of one graph."""

    def loss(p: Any, ends: Any, begins: Any, pairs: Any) -> Any:
        nodes = jnp.concatenate([p["users"], p["products"]])
        sums = jax.ops.segment_sum(nodes[begins], ends, num_segments=96) @ p["w"]
        return -jnp.mean(jax.nn.log_sigmoid((sums[pairs[:, 0]] * sums[pairs[:, 1]]).sum(-1)))

    params = {"users": f32(64, WIDTH), "products": f32(32, WIDTH), "w": f32(WIDTH, WIDTH)}
    found = found_of(loss, params, i32(512), i32(512), i32(128, 2), names="ends begins pairs")
    assert argument(found, "ends").dims == argument(found, "begins").dims == ("edges",)
