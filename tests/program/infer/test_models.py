"""Classes and roles of training steps of many kinds."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import ArrayClasses, CautionKind, Role, StepClasses
from tests.support import infer_models
from tests.support.infer_models import MODELS, Model


@cache
def classes(name: str) -> StepClasses:
    model: Model = getattr(infer_models, name)()
    return model.classes()


def dims(name: str) -> dict[str, tuple[str, ...]]:
    return {one.name: one.dims for one in classes(name).arguments}


def array(name: str, argument: str) -> ArrayClasses:
    return next(one for one in classes(name).arguments if one.name == argument)


def kinds(name: str) -> set[CautionKind]:
    return {one.kind for one in classes(name).cautions}


def batch(name: str) -> list[str]:
    return [one.name for one in classes(name).batches]


def test_attention_has_heads_of_which_the_inner_part_is_not_split() -> None:
    found = dims("transformer")
    for layer in (0, 1):
        for name in "qkv":
            assert found[f"params['layers'][{layer}]['{name}']"] == ("embed", "heads")
        assert found[f"params['layers'][{layer}]['o']"] == ("heads", "embed")
        assert found[f"params['layers'][{layer}]['up']"] == ("embed", "mlp")
        assert found[f"params['layers'][{layer}]['down']"] == ("mlp", "embed")
    heads = classes("transformer").named("heads")
    # 64 columns are 4 heads of 16: all of them may be kept in 64 parts, but computed with in 4.
    assert (heads.size, heads.parts, heads.stored) == (4, 4, 64)
    assert found["params['embed']"] == ("vocab", "embed")
    assert found["params['pos']"] == ("sequence", "embed")
    assert found["x"] == found["y"] == ("batch", "sequence")
    assert batch("transformer") == ["batch"]


def test_moments_belong_to_their_parameters() -> None:
    arguments = classes("transformer").arguments
    moments = [one for one in arguments if one.role == Role.MOMENT]
    parameters = [one for one in arguments if one.role == Role.PARAMETER]
    assert len(moments) == 2 * len(parameters)
    for one in moments:
        assert one.of is not None
        owner = arguments[one.of]
        assert one.name.endswith(owner.name.removeprefix("params"))
        assert one.dims == owner.dims
    assert array("transformer", "opt[0].count").role == Role.COUNTER


def test_stacked_layers_are_walked_over_and_fewer_heads_of_keys_bound_all_heads() -> None:
    found = dims("scanned_layers")
    assert found["params['layers']['q']"][:3] == ("layers", "embed", "heads")
    assert found["params['layers']['k']"][:3] == ("layers", "embed", "heads")
    assert found["params['layers']['q']"][3] == found["params['layers']['k']"][3] == "head_dim"
    layers, heads = (classes("scanned_layers").named(name) for name in ("layers", "heads"))
    assert layers.parts == 1
    assert "a loop walks over it" in layers.whole
    assert heads.parts == 2
    assert found["params['embed']"] == ("vocab", "embed")
    assert CautionKind.TIED in kinds("scanned_layers")
    # The gates have a dimension of their own.
    assert CautionKind.PACKED not in kinds("scanned_layers")


def test_experts() -> None:
    found = dims("experts")
    assert found["params['up']"] == ("expert", "embed", "mlp")
    assert found["params['down']"] == ("expert", "mlp", "embed")
    assert found["params['router']"] == ("embed", "expert")
    # Tokens of all rows meet in the capacities of the experts, and are a batch still.
    assert batch("experts")[0] == "batch"


def test_patches_and_packed_heads() -> None:
    found = dims("vision")
    side, other, channels, embed = found["params['patch']"]
    assert side == other == "kernel"
    assert embed == "embed"
    assert found["x"] == ("batch", "space", "space2", channels)
    # 32 pixels in patches of 8.
    assert classes("vision").named("space").parts == 4
    packed = classes("vision").named(found["params['qkv']"][1])
    assert packed.pieces == (("heads", 64),) * 3
    assert found["params['o']"] == ("heads", "embed")
    assert CautionKind.PACKED in kinds("vision")
    # 16 patches and the class token.
    assert classes("vision").named(found["params['pos']"][1]).whole.startswith("17 divides by no")


def test_an_image_network() -> None:
    found = dims("unet")
    assert found["params['a']"][3] == found["params['b']"][2]
    assert found["params['b']"][3] == found["params['c']"][2]
    up = classes("unet").named(found["params['up']"][2])
    # What comes from below and what is handed over lie end to end.
    assert up.pieces == ((found["params['c']"][3], 32), (found["params['a']"][3], 16))
    assert found["x"][0] == found["t"][0] == "batch"
    assert found["x"][3] == found["params['out']"][3]
    assert batch("unet") == ["batch"]


def test_a_recurrent_network_with_the_batch_first() -> None:
    found = dims("recurrent")
    assert found["x"] == ("batch", "time")
    assert found["params['again']"] == ("hidden", "hidden")
    assert found["params['into']"] == ("embed", "hidden")
    (said,) = [
        one for one in classes("recurrent").cautions if one.kind == CautionKind.GRADIENT_IN_LOOP
    ]
    assert "81,920 numbers" in said.text  # Of both weights: 256 * 256 + 64 * 256.
    assert "each of 32 turns" in said.text
    assert all(one.dims == ("batch", "") for one in classes("recurrent").inner)
    assert classes("recurrent").inner


def test_an_associative_scan_is_a_sequence() -> None:
    assert dims("state_space")["x"] == ("batch", "sequence")
    assert batch("state_space") == ["batch"]
    assert dims("state_space")["params['a']"] == dims("state_space")["params['b']"]


def test_a_graph() -> None:
    found = dims("graph")
    assert found["s"] == found["r"] == ("edges",)
    assert found["x"][0] == found["owner"][0] == "nodes"
    assert found["y"][0] == "graphs"
    assert batch("graph") == ["edges"]
    assert CautionKind.NO_BATCH in kinds("graph")


def test_weights_that_nobody_changes() -> None:
    roles = {one.name: one.role for one in classes("frozen").arguments}
    assert {roles[f"base['{name}']"] for name in ("embed", "up", "bias", "down", "out")} == {
        Role.FROZEN
    }
    assert roles["x"] == roles["y"] == Role.DATA
    assert roles["params['a']"] == Role.PARAMETER
    assert dims("frozen")["base['up']"] == ("embed", "mlp")
    assert dims("frozen")["base['embed']"] == ("vocab", "embed")


def test_tables_of_a_recommender() -> None:
    found = dims("recommender")
    # The columns of the ids mean different things: tables of equal size are one class by their
    # paths alone, those of other sizes are not.
    assert found["params['tables'][0]"][1] == found["params['tables'][2]"][1] == "embed"
    assert found["params['tables'][0]"][0] != found["params['tables'][2]"][0]
    assert found["dense"][0] == found["ids"][0] == found["y"][0] == "batch"
    assert array("recommender", "dense").role == Role.DATA
    rows = classes("recommender").named(found["params['up']"][0])
    assert [size for _, size in rows.pieces] == [16, 16, 16, 13]
    assert rows.parts == 1
    assert {one.role for one in classes("recommender").arguments if "opt" in one.name} == {
        Role.MOMENT
    }


def test_an_encoder_and_a_decoder() -> None:
    found = dims("encoder_decoder")
    assert found["params['target']"] == ("vocab", "embed")
    # Labels are the target's tokens.
    assert found["params['out']"] == ("embed", "vocab")
    assert found["params['source']"][0] != "vocab"
    assert found["params['cross']['q']"][0] == "embed"
    # Nothing in the flow joins both sides; they are of one kind, and one decision is for both.
    assert found["params['cross']['k']"][0] == found["params['source']"][1] == "embed"
    assert found["params['enc']['q']"][1] == found["params['cross']['q']"][1] == "heads"
    assert found["x"][1] != found["y"][1]


def test_two_optimizers() -> None:
    arguments = classes("two_optimizers").arguments
    roles = {one.name: one.role for one in arguments}
    assert roles["g['up']"] == roles["d['up']"] == Role.PARAMETER
    assert roles["slow['up']"] == Role.COPY
    assert arguments[array("two_optimizers", "slow['up']").of or 0].name == "g['up']"
    assert roles["key"] == Role.KEY
    momentum = [one for one in arguments if one.name.startswith("for_d")]
    assert {one.role for one in momentum} == {Role.MOMENT}
    assert {arguments[one.of or 0].name for one in momentum} == {"d['up']", "d['down']"}
    assert ((32, 16), ("batch", "")) in [
        (one.shape, one.dims) for one in classes("two_optimizers").inner
    ]


def test_a_stencil_has_no_batch() -> None:
    assert batch("stencil") == []
    assert CautionKind.NO_BATCH in kinds("stencil")
    assert all(one.role == Role.STATISTIC for one in classes("stencil").arguments)


def test_statistics_come_back_without_a_gradient() -> None:
    roles = {one.name: one.role for one in classes("batch_norm").arguments}
    assert roles["means['mean']"] == roles["means['var']"] == Role.STATISTIC
    assert roles["params['scale']"] == Role.PARAMETER
    assert dims("batch_norm")["means['mean']"] == dims("batch_norm")["params['scale']"]
    assert batch("batch_norm") == ["batch"]


def test_statistics_over_a_batch_that_vmap_has_named() -> None:
    def loss(params: Any, rows: Any) -> Any:
        def one(row: Any) -> Any:
            hidden = row @ params["up"]
            mean = jax.lax.pmean(hidden, "rows")
            spread = jax.lax.pmean((hidden - mean) ** 2, "rows")
            return jnp.tanh((hidden - mean) / jnp.sqrt(spread + 1)) @ params["down"]

        return (jax.vmap(one, axis_name="rows")(rows) ** 2).mean()

    def step(params: Any, rows: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, rows)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    params = {"down": jnp.ones((64, 16)), "up": jnp.ones((32, 64))}
    traced = jax.jit(step).trace(params, jnp.ones((8, 32)))
    found = classes_of(traced.jaxpr, carried={0: 0, 1: 1}, names=["p['down']", "p['up']", "rows"])
    assert [one.name for one in found.batches] == ["batch"]
    assert found.arguments[2].dims[0] == "batch"
    assert CautionKind.UNKNOWN_OPERATION not in {one.kind for one in found.cautions}


def test_per_example_gradients_of_a_convolution() -> None:
    """`vmap` turns what it reshapes: the batch becomes groups of features."""

    def loss(params: Any, image: Any, label: Any) -> Any:
        hidden = jax.lax.conv_general_dilated(
            image, params["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        scores = jax.nn.relu(hidden).reshape(1, -1) @ params["out"]
        return -jnp.sum(jax.nn.log_softmax(scores) * label)

    def step(params: Any, images: Any, labels: Any) -> Any:
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, images, labels)
        clipped = jax.tree.map(lambda g: jnp.clip(g, -1, 1).sum(0), grads)
        return jax.tree.map(lambda p, g: p - g, params, clipped)

    params = {"kernel": jnp.ones((8, 8, 1, 16)), "out": jnp.ones((14 * 14 * 16, 10))}
    images, labels = jnp.ones((64, 1, 28, 28, 1)), jnp.ones((64, 10))
    traced = jax.jit(step).trace(params, images, labels)
    names = ["p['kernel']", "p['out']", "images", "labels"]
    found = classes_of(traced.jaxpr, carried={0: 0, 1: 1}, names=names)
    assert [(one.name, one.size, one.parts) for one in found.batches] == [("batch", 64, 64)]
    # Scores are no sequence, although labels have them beside the batch.
    assert [one.dims for one in found.arguments[2:]][1] == ("batch", "classes")


def test_rows_that_look_up_at_their_own_places() -> None:
    found = dims("target_network")
    assert {found[name][0] for name in ("now", "act", "won", "then")} == {"batch"}
    roles = {one.name: one.role for one in classes("target_network").arguments}
    assert roles["target['up']"] == Role.COPY
    assert roles["n"] == Role.COUNTER


@pytest.mark.parametrize("name", [one.__name__ for one in MODELS])
def test_a_dimension_is_a_multiple_of_its_class(name: str) -> None:
    found = classes(name)
    assert len({one.name for one in found.classes}) == len(found.classes)
    for one in (*found.arguments, *found.results):
        for size, of in zip(one.shape, one.dims, strict=True):
            if not of:
                assert size == 1 or one.role == Role.KEY
                continue
            known = found.named(of)
            assert size % known.size == 0
            assert known.parts == 1 if known.whole else known.size % known.parts == 0
            if one.role in (Role.PARAMETER, Role.MOMENT):
                assert size % known.stored == 0
    for one in found.arguments:
        if one.state_of is not None:
            assert found.results[one.state_of].dims == one.dims
    # Nothing that the samples do is unknown.
    assert CautionKind.UNKNOWN_OPERATION not in kinds(name)
