"""Names of classes that other evidence could hide."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import CautionKind, Role, StepClasses
from automesh.program.infer.search.layout import SP, TP, lay_out
from tests.support.infer_models import XENT, f32, i32

B, T, D, H, K, V = 8, 32, 64, 8, 16, 512


def classes(step: Any, *args: Any) -> StepClasses:
    traced = jax.jit(step).trace(*args)
    paths = jax.tree_util.tree_leaves_with_path(args)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    state = len(jax.tree.leaves(args[0]))
    return classes_of(traced.jaxpr, carried={n: n for n in range(state)}, names=names)


def attends(params: Any, tokens: Any, labels: Any) -> Any:
    x = params["table"][tokens] + params["positions"]
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    x = x + jnp.einsum("bhts,bshk,hkd->btd", weights, v, params["o"])
    return XENT(x @ params["head"], labels).mean()


def trained(params: Any, tokens: Any, labels: Any) -> Any:
    value, slopes = jax.value_and_grad(attends)(params, tokens, labels)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes), value


def language_model() -> StepClasses:
    params = {name: f32(D, H, K) for name in "qkv"}
    params |= {"table": f32(V, D), "positions": f32(T, D), "o": f32(H, K, D), "head": f32(D, V)}
    return classes(trained, params, i32(B, T), i32(B, T))


def test_learned_positions_are_a_sequence_and_the_values_have_the_size_of_a_head() -> None:
    found = language_model()
    dims = {one.name: one.dims for one in found.arguments}
    assert dims["[0]['positions']"] == ("sequence", "embed")
    # Weights times values sum over the sequence, which is a class of parameters here.
    assert dims["[0]['v']"] == dims["[0]['q']"] == ("embed", "heads", "head_dim")


def test_a_sequence_of_learned_positions_has_an_axis_of_its_own_or_that_of_the_products() -> None:
    layout = lay_out(language_model(), num_devices=8, script="lm.py")
    over = {axis.name: axis.choices for axis in layout.logical}
    assert over["sequence"] == ((), (SP,), (TP,))
    assert over["heads"] == ((), (TP,))
    # Whoever splits heads leaves each of them whole.
    assert "head_dim" not in over


def test_labels_of_their_own_are_numbers_of_the_same_vocabulary() -> None:
    dims = {one.name: one.dims for one in language_model().arguments}
    assert dims["[0]['table']"] == ("vocab", "embed")
    assert dims["[0]['head']"] == ("embed", "vocab")


def accumulated(params: Any, xs: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

    def turn(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, x)), None

    zero = (0.0, jax.tree.map(jnp.zeros_like, params))
    (value, slopes), _ = jax.lax.scan(turn, zero, xs)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes), value


def test_slices_whose_gradients_are_summed_are_microbatches() -> None:
    found = classes(accumulated, {"up": f32(D, 4 * D), "down": f32(4 * D, D)}, f32(4, B, D))
    assert found.arguments[-1].dims[:2] == ("microbatch", "batch")
    [caution] = [one for one in found.cautions if one.kind is CautionKind.GRADIENT_IN_LOOP]
    assert f"{2 * 4 * D * D:,} numbers are summed over the batch in each of 4 turns" in caution.text


def test_frozen_weights_of_stacked_layers_are_no_data() -> None:
    def layer(x: Any, both: Any) -> Any:
        frozen, low = both
        h = x @ frozen["in"] + x @ low["a"] @ low["b"]
        return x + jax.nn.gelu(h @ frozen["up"]) @ frozen["down"], None

    def loss(low: Any, frozen: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.scan(layer, x, (frozen, low))[0] ** 2)

    def step(low: Any, frozen: Any, x: Any) -> Any:
        value, slopes = jax.value_and_grad(loss)(low, frozen, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, low, slopes), value

    low = {"a": f32(3, D, 4), "b": f32(3, 4, D)}
    frozen = {"in": f32(3, D, D), "up": f32(3, D, 4 * D), "down": f32(3, 4 * D, D)}
    found = classes(step, low, frozen, f32(B, T, D))
    arguments = {one.name: one for one in found.arguments}
    for name in frozen:
        assert arguments[f"[1]['{name}']"].role is Role.FROZEN
    up, down = arguments["[1]['up']"], arguments["[1]['down']"]
    assert up.dims[0] == down.dims[0] == "layers"
    assert up.dims[2] == down.dims[1]
    # Nothing of what is given anew in each step has their width.
    assert up.dims[2] not in arguments["[2]"].dims
    over = {axis.name: axis.choices for axis in lay_out(found, num_devices=8, script="x").logical}
    assert over[up.dims[2]] == ((), (TP,))


def test_a_second_stream_has_the_names_of_the_first_one() -> None:
    def tower(x: Any, layers: Any) -> Any:
        for layer in layers:
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return x.mean(1)

    def step(params: Any, images: Any, captions: Any) -> Any:
        def loss(params: Any) -> Any:
            one = tower(images @ params["patch"], params["image"])
            other = tower(params["table"][captions], params["text"])
            return -jnp.mean(jax.nn.log_softmax(one @ other.T).diagonal())

        value, slopes = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes), value

    layers = [{"up": f32(D, 4 * D), "down": f32(4 * D, D)}] * 2
    params = {"image": layers, "text": layers, "patch": f32(48, D), "table": f32(V, D)}
    found = classes(step, params, f32(B, T, 48), i32(B, T))
    dims = {one.name: one.dims for one in found.arguments}
    assert dims["[0]['text'][0]['up']"] == dims["[0]['image'][0]['up']"] == ("embed", "mlp")


def test_a_batch_that_the_step_divides_into_microbatches_is_split_where_it_is_divided() -> None:
    def step(params: Any, x: Any) -> Any:
        return accumulated(params, x.reshape(4, -1, D))

    found = classes(step, {"up": f32(D, 4 * D), "down": f32(4 * D, D)}, f32(4 * B, D))
    assert found.arguments[-1].role is Role.DATA
    [batch] = found.batches
    assert (batch.name, batch.size) == ("batch", B)
    assert found.arguments[-1].dims[0] == "microbatch"
    [inside] = found.inner
    assert (inside.shape, inside.dims) == ((4, B, D), ("", "batch", ""))
    layout = lay_out(found, num_devices=8, script="x")
    # Split as it comes in, a device would have whole micro-batches, which the loop would gather.
    assert layout.arguments[-1].split == ((), ())
    assert layout.batch_parts == B


def test_a_sequence_whose_elements_never_meet_is_split_once() -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

        value, slopes = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, slopes), value

    found = classes(step, {"up": f32(D, 4 * D), "down": f32(4 * D, D)}, f32(B, T, D))
    layout = lay_out(found, num_devices=8, script="x")
    names = [axis.name for axis in layout.logical]
    assert len({*names}) == len(names), names
    assert dict(zip(names, layout.logical, strict=True))["sequence"].choices[1] == (SP,)


def test_a_batch_out_of_a_replay_buffer_that_the_step_changes() -> None:
    def step(state: Any, key: Any, new: Any) -> Any:
        rows = jax.lax.dynamic_update_slice(state["buffer"], new, (state["at"], 0))
        drawn = rows[jax.random.randint(key, (64,), 0, 1024)]

        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(drawn @ params["up"]) @ params["down"] - drawn) ** 2)

        value, slopes = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], slopes)
        return {"at": state["at"] + B, "buffer": rows, "params": params}, value

    params = {"up": f32(D, 4 * D), "down": f32(4 * D, D)}
    state = {"at": i32(), "buffer": f32(1024, D), "params": params}
    found = classes(step, state, jax.eval_shape(lambda: jax.random.key(0)), f32(B, D))
    assert [(one.name, one.size) for one in found.batches] == [("batch", 64)]
    assert [(one.shape, one.dims) for one in found.inner] == [((64, D), ("batch", ""))]
    buffer = next(one for one in found.arguments if "buffer" in one.name)
    # Rows at any places are taken from it: to split them gathers all of it.
    assert found.named(buffer.dims[0]).whole.startswith("the step takes rows of it")
