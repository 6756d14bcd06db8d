"""Rows that are summed up in sets: bags, the support of an episode, groups, and views."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.infer.nouns import CautionKind, Role, StepClasses
from tests.support.infer_models import XENT, Model, argument, descended, f32, i32

LAYERS = {"w1": f32(24, 128), "w2": f32(128, 96), "w3": f32(96, 10)}
IMAGES = {"c1": f32(3, 3, 3, 16), "c2": f32(3, 3, 16, 32), "w": f32(32, 10)}


def network(p: Any, x: Any) -> Any:
    return jax.nn.relu(jax.nn.relu(x @ p["w1"]) @ p["w2"]) @ p["w3"]


def image_network(p: Any, x: Any) -> Any:
    def layer(x: Any, w: Any, stride: int) -> Any:
        axes = ("NHWC", "HWIO", "NHWC")
        made = jax.lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=axes)
        return jax.nn.relu(made)

    return layer(layer(x, p["c1"], 1), p["c2"], 2).mean((1, 2)) @ p["w"]


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


@pytest.mark.parametrize("how", ["softmax", "mean"])
def test_bags_whose_elements_are_weighed_against_each_other_are_no_graphs(how: str) -> None:
    """Before, elements that take the sum of their own bag were edges between nodes."""

    def loss(p: Any, x: Any, bag: Any, y: Any) -> Any:
        def total(x: Any) -> Any:
            return jax.ops.segment_sum(x, bag, 32)

        hidden = jax.nn.relu(jax.nn.relu(x @ p["w1"]) @ p["w2"])
        if how == "softmax":
            scores = hidden.mean(-1)
            scores = jnp.exp(scores - jax.ops.segment_max(scores, bag, 32)[bag])
            hidden = hidden * (scores / total(scores)[bag])[:, None]
        else:
            hidden = hidden - (total(hidden) / total(jnp.ones(512))[:, None])[bag]
        return jnp.mean(XENT(total(hidden) @ p["w3"], y))

    found = found_of(loss, LAYERS, f32(512, 24), i32(512), i32(32), names="x bag y")
    assert batches(found) == {"batch": 512, "batch2": 32}
    assert argument(found, "x").dims[0] == argument(found, "bag").dims[0] == "batch"
    assert argument(found, "y").dims == ("batch2",)
    assert CautionKind.NO_BATCH not in kinds(found)


def test_edges_that_weigh_the_nodes_they_end_at_stay_edges() -> None:
    """Attention over the edges of a node: these look up in nodes at which they begin, too."""

    def loss(p: Any, x: Any, sender: Any, receiver: Any, y: Any) -> Any:
        hidden = jax.nn.relu(x @ p["w1"])
        scores = jnp.exp((hidden[sender] * hidden[receiver]).mean(-1))
        scores = scores / jax.ops.segment_sum(scores, receiver, 64)[receiver]
        hidden = jax.ops.segment_sum(hidden[sender] * scores[:, None], receiver, 64)
        return jnp.mean(XENT(jax.nn.relu(hidden @ p["w2"]) @ p["w3"], y))

    found = found_of(
        loss, LAYERS, f32(64, 24), i32(512), i32(512), i32(64), names="x sender receiver y"
    )
    assert argument(found, "sender").dims == argument(found, "receiver").dims == ("edges",)
    assert argument(found, "x").dims[0] == argument(found, "y").dims[0] == "nodes"


def test_the_support_of_an_episode_is_a_batch_beside_its_queries() -> None:
    """Before, every device computed the network of the whole support."""

    def loss(p: Any, support: Any, shown: Any, query: Any, labels: Any) -> Any:
        of_class = jax.nn.one_hot(shown, 5)
        centres = of_class.T @ network(p, support) / of_class.sum(0)[:, None]
        distances = ((network(p, query)[:, None] - centres) ** 2).sum(-1)
        return jnp.mean(XENT(-distances, labels))

    found = found_of(
        loss, LAYERS, f32(40, 24), i32(40), f32(80, 24), i32(80), names="support shown query labels"
    )
    assert batches(found) == {"batch": 80, "batch2": 40}
    assert argument(found, "support").dims[0] == argument(found, "shown").dims[0] == "batch2"


def test_stacked_views_of_images_leave_the_images_a_batch() -> None:
    """Before, height and width were batches: no window was between the products that parameters
    are in, but in one."""

    def loss(p: Any, x: Any, key: Any) -> Any:
        keys = jax.random.split(key)
        views = jnp.stack([x + jax.random.normal(one, x.shape) for one in keys])
        made = image_network(p, views.reshape(-1, 32, 32, 3))
        made = made / jnp.linalg.norm(made, axis=-1, keepdims=True)
        scores = jnp.where(jnp.eye(128, dtype=bool), -1e9, made @ made.T / 0.1)
        return jnp.mean(XENT(scores, jnp.roll(jnp.arange(128), 64)))

    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    found = found_of(loss, IMAGES, f32(64, 32, 32, 3), key, names="x key")
    assert batches(found) == {"batch": 64}
    assert argument(found, "x").dims[0] == "batch"
    assert CautionKind.INNER_BATCH in kinds(found)


@pytest.mark.parametrize("of", ["rows", "images"])
def test_rows_with_and_without_labels_that_are_interleaved_are_batches(of: str) -> None:
    """So that statistics of each part of a batch are of all kinds of rows (FixMatch). Before,
    nothing was a batch, as the groups cross the labelled rows and the others."""
    apply, params = (network, LAYERS) if of == "rows" else (image_network, IMAGES)
    shape = (24,) if of == "rows" else (32, 32, 3)

    def mixed(x: Any, *, back: bool = False) -> Any:
        groups = (15, -1) if back else (-1, 15)
        return x.reshape(*groups, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)

    def loss(p: Any, x: Any, y: Any, weak: Any, strong: Any) -> Any:
        made = mixed(apply(p, mixed(jnp.concatenate([x, weak, strong]))), back=True)
        shown, (known, guessed) = made[:64], jnp.split(made[64:], 2)
        known = jax.lax.stop_gradient(jax.nn.softmax(known))
        sure = known.max(-1) > 0.95
        return jnp.mean(XENT(shown, y)) + jnp.mean(XENT(guessed, known.argmax(-1)) * sure)

    data = (f32(64, *shape), i32(64), f32(448, *shape), f32(448, *shape))
    found = found_of(loss, params, *data, names="x y weak strong")
    assert batches(found) == {"packed": 960, "batch": 448, "batch2": 64}
    assert sorted((one.size, one.parts) for one in found.batches) == [
        (64, 64),
        (448, 448),
        (960, 64),
    ]
    rows = [argument(found, name).dims[0] for name in ("x", "y", "weak", "strong")]
    assert rows == ["batch2", "batch2", "batch", "batch"]
    # Nothing else would split what the network computes of them.
    assert {one.dims[0] for one in found.activations if not one.is_gathered} == {"packed"}
    assert CautionKind.NO_BATCH not in kinds(found)


def test_parts_of_a_replay_buffer_that_come_back_unchanged_are_data() -> None:
    """Before, they were frozen tables, and their rows a vocabulary that was searched over tp."""

    def step(p: Any, buffer: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        rows = jax.random.randint(own, (128,), 0, 4096)

        def loss(p: Any) -> Any:
            return jnp.mean((network(p, buffer["seen"][rows]) - buffer["won"][rows][:, None]) ** 2)

        p, value = descended(loss, p)
        return p, buffer, key, value

    buffer = {"seen": f32(4096, 24), "won": f32(4096)}
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    model = Model(step=step, args=(LAYERS, buffer, key), names=("p", "buffer", "key"), num_state=3)
    found = model.classes()
    assert batches(found) == {"batch": 128}
    for name in ("buffer['seen']", "buffer['won']"):
        assert argument(found, name).role == Role.DATA
        assert "takes rows" in found.named(argument(found, name).dims[0]).whole


@pytest.mark.parametrize("how", ["transform", "window"])
def test_a_padded_sequence_whose_elements_meet_is_no_batch(how: str) -> None:
    """A long convolution. Before, only what was padded met, and the sequence was a batch."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        hidden = x @ p["in"]
        if how == "transform":
            kernel = jnp.fft.rfft(p["kernel"], 128, axis=0)
            hidden = jnp.fft.irfft(jnp.fft.rfft(hidden, 128, axis=1) * kernel, 128, axis=1)[:, :64]
        else:
            padded = jnp.pad(hidden, ((0, 0), (63, 0), (0, 0)))
            hidden = jax.lax.conv_general_dilated(
                padded,
                p["kernel"][:, None],
                (1,),
                "VALID",
                dimension_numbers=("NWC", "WIO", "NWC"),
                feature_group_count=32,
            )
        return jnp.mean((hidden @ p["out"] - y) ** 2)

    params = {"in": f32(24, 32), "kernel": f32(64, 32), "out": f32(32, 24)}
    found = found_of(loss, params, f32(16, 64, 24), f32(16, 64, 24), names="x y")
    assert batches(found) == {"batch": 16}


def test_a_square_quantized_matrix_in_a_residual_stream_is_frozen() -> None:
    """Before, a matrix of integers both of whose dimensions are the stream's was data."""

    def loss(p: Any, base: Any, x: Any) -> Any:
        hidden = x @ p["in"]
        weight = base["q"].astype(jnp.float32) * base["scale"]
        hidden = hidden + jax.nn.relu(hidden @ weight + hidden @ p["a"] @ p["b"])
        return jnp.mean((hidden @ p["out"]) ** 2)

    params = {"a": f32(64, 4), "b": f32(4, 64), "in": f32(24, 64), "out": f32(64, 8)}
    base = {"q": jax.ShapeDtypeStruct((64, 64), jnp.int8), "scale": f32(64)}
    found = found_of(loss, params, base, f32(16, 24), names="base x")
    assert argument(found, "base['q']").role == Role.FROZEN
    assert argument(found, "x").role == Role.DATA


def test_the_feature_at_which_a_tree_splits_is_a_column_and_no_row_of_a_data_set() -> None:
    """Before, the features of boosted trees were rows that the step takes from a data set."""

    def step(said: Any, x: Any, edges: Any, y: Any) -> Any:
        rest = y - said
        is_left = x[:, :, None] < edges
        sums, counts = jnp.einsum("rfe,r->fe", is_left.astype(x.dtype), rest), is_left.sum(0)
        best = jnp.argmax(sums**2 / (counts + 1))
        feature, edge = best // 32, best % 32
        side = x[:, feature] < edges[feature, edge]
        said = said + 0.1 * jnp.where(side, sums[feature, edge], rest.mean())
        return said, jnp.mean(rest**2)

    args = (f32(1024), f32(1024, 16), f32(16, 32), f32(1024))
    found = Model(step=step, args=args, names=("said", "x", "edges", "y"), num_state=1).classes()
    assert CautionKind.GATHERS_DATA_SET not in kinds(found)
    rows, features = argument(found, "x").dims
    assert argument(found, "said").dims == argument(found, "y").dims == (rows,)
    assert argument(found, "edges").dims[0] == features
    assert not {features, argument(found, "edges").dims[1]} & batches(found).keys()


def test_one_row_that_a_step_takes_is_of_a_data_set() -> None:
    def step(p: Any, count: Any, x: Any) -> Any:
        p, value = descended(lambda p: jnp.mean(network(p, x[count]) ** 2), p)
        return p, count + 1, value

    model = Model(
        step=step, args=(LAYERS, i32(), f32(512, 24)), names=("p", "count", "x"), num_state=2
    )
    found = model.classes()
    assert CautionKind.GATHERS_DATA_SET in kinds(found)


@pytest.mark.parametrize("drawn", ["rows", "layer"])
def test_frozen_weights_that_are_chosen_at_random_stay_frozen(drawn: str) -> None:
    """Before, a table from which negatives are drawn was a data set."""

    def step(p: Any, frozen: Any, key: Any, x: Any) -> Any:
        key, own = jax.random.split(key)
        rows = jax.random.randint(own, (64,) if drawn == "rows" else (), 0, frozen.shape[0])

        def loss(p: Any) -> Any:
            if drawn == "rows":
                return jnp.mean((network(p, x) * (frozen[rows] @ p["w3"])).sum(-1) ** 2)
            return jnp.mean((x @ p["w1"] - x @ frozen[rows]) ** 2) + network(p, x).mean()

        p, value = descended(loss, p)
        return p, frozen, key, value

    frozen = f32(4096, 96) if drawn == "rows" else f32(4, 24, 128)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    args = (LAYERS, frozen, key, f32(64, 24))
    model = Model(step=step, args=args, names=("p", "frozen", "key", "x"), num_state=3)
    assert argument(model.classes(), "frozen").role == Role.FROZEN


def test_a_sequence_that_is_summed_up_step_by_step_is_no_batch() -> None:
    def loss(p: Any, sequence: Any, x: Any, y: Any) -> Any:
        context = jnp.cumsum(network(p, sequence), 0).sum(0)
        return jnp.mean(XENT(network(p, x) + context, y))

    data = (f32(16, 24), f32(64, 24), i32(64))
    assert batches(found_of(loss, LAYERS, *data, names="sequence x y")) == {"batch": 64}


def test_a_batch_that_lies_in_the_second_dimension_is_taken_from_a_data_set() -> None:
    def step(p: Any, count: Any, x: Any) -> Any:
        p, value = descended(lambda p: jnp.mean(network(p, x[:, count]) ** 2), p)
        return p, count + 1, value

    args = (LAYERS, i32(), f32(64, 100, 24))
    found = Model(step=step, args=args, names=("p", "count", "x"), num_state=2).classes()
    assert CautionKind.GATHERS_DATA_SET in kinds(found)
