"""Kinds of steps whose rows come back to their places, whose layers or experts are taken by their
numbers, and whose data are compared with parameters or with each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from automesh.program.infer.nouns import CautionKind, Role
from automesh.program.infer.search.layout import lay_out
from tests.support.infer_models import XENT, Model, attend, descended, f32, i32

BATCH, LENGTH, WIDTH, INSIDE, VOCAB = 16, 64, 128, 512, 1000


def found_of(loss: Any, params: dict[str, Any], *data: Any, names: str = "x y") -> Any:
    def step(p: Any, *data: Any) -> Any:
        return descended(loss, p, *data)

    return Model(
        step=step, args=(params, *data), names=("p", *names.split()), num_state=1
    ).classes()


def dims(found: Any) -> dict[str, tuple[str, ...]]:
    return {one.name: one.dims for one in found.arguments}


def over_tp(found: Any) -> set[str]:
    layout = lay_out(found, num_devices=8, script="train.py")
    return {one.name for one in layout.logical if ("tp",) in one.choices}


def test_tokens_that_come_back_to_their_places_are_no_edges() -> None:
    """Some tokens of each sequence go through a layer (mixture of depths)."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        h = p["embed"][x]
        weights, places = jax.lax.top_k(h @ p["router"], 16)
        places = jnp.sort(places, 1)
        chosen = jnp.take_along_axis(h, places[..., None], 1)
        chosen = jax.nn.gelu(chosen @ p["up"]) @ p["down"] * weights[..., None]
        h = h.at[jnp.arange(BATCH)[:, None], places].add(chosen)
        return jnp.mean(XENT(h @ p["embed"].T, y))

    params = {
        "down": f32(INSIDE, WIDTH), "embed": f32(VOCAB, WIDTH), "router": f32(WIDTH),
        "up": f32(WIDTH, INSIDE),
    }  # fmt: skip
    found = found_of(loss, params, i32(BATCH, LENGTH), i32(BATCH, LENGTH))
    assert dims(found)["x"] == ("batch", "sequence")
    assert CautionKind.NO_BATCH not in {one.kind for one in found.cautions}


def test_tokens_of_packed_documents_without_a_batch_choose_in_a_vocabulary() -> None:
    """All documents lie end to end, and each attends to itself."""

    def loss(p: Any, tokens: Any, document: Any) -> Any:
        h = p["embed"][tokens]
        scores = jnp.where(document[:, None] == document, h @ p["q"] @ h.T, -1e9)
        h = h + jax.nn.softmax(scores) @ h @ p["out"]
        return jnp.mean(XENT((h @ p["embed"].T)[:-1], tokens[1:]))

    params = {"embed": f32(VOCAB, WIDTH), "out": f32(WIDTH, WIDTH), "q": f32(WIDTH, WIDTH)}
    found = found_of(loss, params, i32(1024), i32(1024), names="tokens document")
    names = dims(found)
    assert (names["tokens"], names["p['embed']"][0]) == (("sequence",), "vocab")


def test_a_table_with_a_trained_row_behind_it_is_frozen() -> None:
    """The embedding of one new word is trained, and all others are not."""

    def loss(p: Any, frozen: Any, x: Any, y: Any) -> Any:
        table = jnp.concatenate([frozen["embed"], p["word"]])
        h = jnp.tanh(table[x] @ frozen["w"])
        return jnp.mean(XENT(h @ table.T, y))

    frozen = {"embed": f32(VOCAB, WIDTH), "w": f32(WIDTH, WIDTH)}
    found = found_of(
        loss, {"word": f32(1, WIDTH)}, frozen, i32(BATCH, LENGTH), i32(BATCH, LENGTH),
        names="frozen x y",
    )  # fmt: skip
    roles = {one.name: one.role for one in found.arguments}
    assert roles["frozen['embed']"] == roles["frozen['w']"] == Role.FROZEN


def test_queries_and_documents_with_negatives_are_one_batch() -> None:
    """Each query has the scores of the documents of all queries; its own is each sixth."""

    def loss(p: Any, queries: Any, documents: Any) -> Any:
        scores = jnp.einsum("bd,ckd->bck", queries @ p["q"], documents @ p["d"])
        return jnp.mean(XENT(scores.reshape(BATCH, -1), jnp.arange(BATCH) * 2 * 3))

    found = found_of(
        loss, {"d": f32(200, WIDTH), "q": f32(200, WIDTH)}, f32(BATCH, 200), f32(BATCH, 6, 200),
        names="queries documents",
    )  # fmt: skip
    names = dims(found)
    assert names["queries"][0] == names["documents"][0] == "batch"
    (documents,) = [one for one in found.arguments if one.name == "documents"]
    assert documents.role == Role.DATA


def test_layers_that_python_takes_by_their_numbers_are_not_split_over_tp() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        for layer in range(4):
            x = x + jnp.tanh(x @ p["up"][layer]) @ p["down"][layer]
        return jnp.mean((x - y) ** 2)

    params = {"down": f32(4, INSIDE, WIDTH), "up": f32(4, WIDTH, INSIDE)}
    found = found_of(loss, params, f32(BATCH, WIDTH), f32(BATCH, WIDTH))
    names = dims(found)
    assert names["p['up']"][0] == names["p['down']"][0] == "layers"
    assert "layers" not in over_tp(found)


def test_a_gate_beside_its_input_is_a_stack_that_stays_whole() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        both = jnp.einsum("bd,dcf->bcf", x, p["up"])
        return jnp.mean((x + (jax.nn.silu(both[:, 0]) * both[:, 1]) @ p["down"] - y) ** 2)

    params = {"down": f32(INSIDE, WIDTH), "up": f32(WIDTH, 2, INSIDE)}
    found = found_of(loss, params, f32(BATCH, WIDTH), f32(BATCH, WIDTH))
    names = dims(found)
    assert names["p['up']"][1] == "stack"
    assert names["p['up']"][2] == names["p['down']"][0]
    assert "stack" not in over_tp(found)


def test_values_that_weigh_keys_have_the_size_of_a_head() -> None:
    """Linear attention multiplies keys with values first, and no group of queries has both."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in ("q", "k", "v"))
        state = jnp.cumsum(jnp.einsum("bshk,bshv->bshkv", jax.nn.elu(k) + 1, v), 1)
        out = jnp.einsum("bshk,bshkv,hvd->bsd", jax.nn.elu(q) + 1, state, p["out"])
        return jnp.mean((x + out - y) ** 2)

    params = {name: f32(WIDTH, 8, 16) for name in ("k", "q", "v")}
    found = found_of(loss, {**params, "out": f32(8, 16, WIDTH)}, *[f32(BATCH, LENGTH, WIDTH)] * 2)
    names = dims(found)
    assert names["p['v']"][1:] == names["p['out']"][:2]
    assert names["p['v']"][1] == "heads"
    assert names["p['v']"][2].startswith("head_dim")


def test_nodes_whose_neighbours_are_a_matrix_are_nodes() -> None:
    def loss(p: Any, x: Any, neighbours: Any, y: Any) -> Any:
        h = x @ p["in"]
        scores = jnp.where(neighbours > 0, h @ p["to"] + (h @ p["from"]).T, -1e9)
        return jnp.mean(XENT(jax.nn.softmax(scores) @ h @ p["out"], y))

    params = {
        "from": f32(WIDTH, 1),
        "in": f32(200, WIDTH),
        "out": f32(WIDTH, 8),
        "to": f32(WIDTH, 1),
    }
    found = found_of(loss, params, f32(512, 200), f32(512, 512), i32(512), names="x neighbours y")
    assert dims(found)["neighbours"] == ("nodes", "nodes")


def test_what_parameters_are_compared_with_are_features() -> None:
    """Distances of rows from centres; a sequence would have learned positions, or attend."""

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(jnp.min(jnp.sum((x[:, None] - p["centres"]) ** 2, -1), -1))

    found = found_of(loss, {"centres": f32(64, 16)}, f32(4096, 16), names="x")
    assert dims(found)["x"] == ("batch", "features")


def test_results_that_labels_cut_are_no_positions() -> None:
    """Colours and density, of which colours are compared with the image."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        out = jax.nn.relu(x @ p["up"]) @ p["out"]
        return jnp.mean((jax.nn.sigmoid(out[:, :3]) * out[:, 3:] - y) ** 2)

    found = found_of(
        loss, {"out": f32(WIDTH, 4), "up": f32(32, WIDTH)}, f32(4096, 32), f32(4096, 3)
    )
    assert not dims(found)["p['out']"][1].startswith("positions")


def test_rows_of_learned_positions_are_a_sequence_as_before() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        h = p["embed"][x] + p["positions"]
        h = h + attend(h, h, p["attention"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(h @ p["embed"].T, y))

    attention = {name: f32(WIDTH, WIDTH) for name in ("k", "q", "v")}
    params = {
        "attention": attention, "embed": f32(VOCAB, WIDTH), "positions": f32(LENGTH, WIDTH),
    }  # fmt: skip
    found = found_of(loss, params, i32(BATCH, LENGTH), i32(BATCH, LENGTH))
    assert dims(found)["p['positions']"][0] == "sequence"


def test_two_critics_of_which_each_is_taken_are_branches() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        inside = jax.nn.relu(jnp.einsum("bd,edf->ebf", x, p["up"]))
        values = jnp.einsum("ebf,efo->ebo", inside, p["out"]).mean(-1)
        return jnp.mean((jnp.minimum(values[0], values[1]) - y) ** 2) + jnp.mean(values**2)

    params = {"out": f32(2, INSIDE, 8), "up": f32(2, WIDTH, INSIDE)}
    found = found_of(loss, params, f32(BATCH, WIDTH), f32(BATCH))
    assert dims(found)["p['up']"][0] == "branch"


@pytest.mark.parametrize("groups", [1, 4])
def test_experts_of_which_all_do_all_rows_are_experts(groups: int) -> None:
    """Each token goes through all experts, and its chosen ones count; chosen in groups, too."""
    experts = 16

    def loss(p: Any, x: Any, y: Any) -> Any:
        scores = jax.nn.sigmoid(x @ p["router"])
        if groups > 1:
            grouped = scores.reshape(*scores.shape[:-1], groups, -1)
            _, kept = jax.lax.top_k(jnp.max(grouped, -1), 2)
            mask = jnp.sum(jax.nn.one_hot(kept, groups), -2)
            scores = (grouped * mask[..., None]).reshape(scores.shape)
        weights, chosen = jax.lax.top_k(scores, 2)
        mixing = jnp.sum(jax.nn.one_hot(chosen, experts) * weights[..., None], -2)
        inside = jax.nn.silu(jnp.einsum("bsd,edf->bsef", x, p["up"]))
        return jnp.mean((jnp.einsum("bsef,efd,bse->bsd", inside, p["down"], mixing) - y) ** 2)

    params = {
        "down": f32(experts, 24, WIDTH),
        "router": f32(WIDTH, experts),
        "up": f32(experts, WIDTH, 24),
    }
    names = dims(found_of(loss, params, *[f32(BATCH, LENGTH, WIDTH)] * 2))
    assert names["p['router']"][1] == names["p['up']"][0] == names["p['down']"][0] == "expert"


def test_actions_of_several_critics_are_no_experts() -> None:
    def loss(p: Any, seen: Any, action: Any) -> Any:
        inside = jax.nn.relu(jnp.einsum("bd,edf->ebf", seen, p["up"]))
        values = jnp.einsum("ebf,efa->eba", inside, p["out"])
        best = jnp.take_along_axis(values, jnp.argmax(values.mean(0), -1)[None, :, None], -1)
        taken = jnp.take_along_axis(values, action[None, :, None], -1)
        return jnp.mean((taken - jax.lax.stop_gradient(best)) ** 2)

    params = {"out": f32(5, INSIDE, 12), "up": f32(5, WIDTH, INSIDE)}
    names = dims(found_of(loss, params, f32(BATCH, WIDTH), i32(BATCH), names="seen action"))
    assert names["p['out']"][0] == "branch"
    assert names["p['out']"][2] != "expert"


def test_a_rotation_of_neighbours_leaves_the_size_of_a_head_its_name() -> None:
    """Each pair of neighbours is rotated, and put together again (as in Llama 4)."""

    def rotate(x: Any) -> Any:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        angles = jnp.arange(x.shape[1])[:, None, None] * jnp.ones(pairs.shape[-2])
        one, two = pairs[..., 0], pairs[..., 1]
        turned = [one * jnp.cos(angles) - two * jnp.sin(angles), two * jnp.cos(angles) + one]
        return jnp.stack(turned, -1).reshape(x.shape)

    def loss(p: Any, x: Any, y: Any) -> Any:
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", rotate(q), rotate(k)))
        return jnp.mean((jnp.einsum("bhst,bthk,hkd->bsd", scores, v, p["out"]) - y) ** 2)

    params = {name: f32(WIDTH, 4, 6) for name in ("k", "q", "v")}
    names = dims(
        found_of(loss, {**params, "out": f32(4, 6, WIDTH)}, *[f32(BATCH, LENGTH, WIDTH)] * 2)
    )
    assert names["p['q']"][2].startswith("head_dim")
    assert names["p['q']"] == names["p['k']"]
    assert names["x"][:2] == ("batch", "sequence")


def test_a_window_that_slides_along_tokens_leaves_them_a_sequence() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        slid = jax.lax.conv_general_dilated(
            x @ p["up"], p["kernel"], (1,), [(3, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=INSIDE,
        )  # fmt: skip
        return jnp.mean((slid @ p["down"] - y) ** 2)

    params = {"down": f32(INSIDE, WIDTH), "kernel": f32(4, 1, INSIDE), "up": f32(WIDTH, INSIDE)}
    found = found_of(loss, params, *[f32(BATCH, LENGTH, WIDTH)] * 2)
    assert dims(found)["x"][:2] == ("batch", "sequence")


def test_rows_that_are_summed_at_their_nearest_centres_are_a_batch() -> None:
    """k-means: each row chooses one centre, and is no chosen one itself."""

    def step(centres: Any, x: Any) -> Any:
        distance = jnp.sum((x[:, None] - centres) ** 2, -1)
        nearest = jnp.argmin(distance, 1)
        counts = jax.ops.segment_sum(jnp.ones(len(x)), nearest, 20)
        return jax.ops.segment_sum(x, nearest, 20) / counts[:, None]

    found = Model(
        step=step, args=(f32(20, 8), f32(4096, 8)), names=("centres", "x"), num_state=1
    ).classes()
    assert dims(found)["x"][0] == "batch"


def test_distances_of_tokens_choose_in_a_table_of_their_own() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        position = jnp.arange(LENGTH)
        bias = p["relative"][jnp.maximum(position[:, None] - position[None, :], 0)]
        q, k = (jnp.einsum("bsd,dhk->bshk", x, p[name]) for name in ("q", "k"))
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k) + bias.transpose(2, 0, 1))
        return jnp.mean((jnp.einsum("bhst,btd->bsd", scores, x) - y) ** 2)

    params = {"k": f32(WIDTH, 8, 16), "q": f32(WIDTH, 8, 16), "relative": f32(LENGTH, 8)}
    names = dims(found_of(loss, params, *[f32(BATCH, LENGTH, WIDTH)] * 2))
    assert names["p['relative']"] == ("positions", "heads")


def test_a_batch_with_a_matrix_of_likeness_is_a_batch() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        z = x @ p["up"]
        return jnp.mean((z @ z.T - y) ** 2)

    found = found_of(loss, {"up": f32(WIDTH, INSIDE)}, f32(BATCH, WIDTH), f32(BATCH, BATCH))
    assert dims(found)["x"][0] == "batch"


def test_columns_of_data_that_are_taken_one_by_one_stay_features() -> None:
    def loss(p: Any, x: Any, y: Any) -> Any:
        waves = jnp.stack([jnp.sin((place + 1) * x[:, place]) for place in range(8)], -1)
        return jnp.mean(((waves @ p["waves"] + x @ p["up"]) @ p["out"] - y) ** 2)

    params = {"out": f32(INSIDE, 8), "up": f32(8, INSIDE), "waves": f32(8, INSIDE)}
    found = found_of(loss, params, f32(BATCH, 8), f32(BATCH, 8))
    assert "stack" not in dims(found)["x"]
