"""Classes of steps whose parameters are held by libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from automesh.program.capture.shown import without_shown
from automesh.program.infer.classes import classes_of
from automesh.program.infer.nouns import CautionKind, Role, StepClasses
from tests.support.infer_models import ADAM, XENT, f32, i32

OF_SHAPE = {"Dense_0": ("embed", "mlp"), "Dense_1": ("mlp", "embed")}


def found(step: Callable[..., Any], args: tuple[Any, ...], num_state: int) -> StepClasses:
    paths = jax.tree_util.tree_leaves_with_path(args)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    count = len(jax.tree.leaves(args[:num_state]))
    traced = jax.jit(step).trace(*args)
    return classes_of(traced.jaxpr, carried={k: k for k in range(count)}, names=names)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        inside = nn.gelu(nn.Dense(256)(nn.LayerNorm()(x)))
        return x + nn.Dense(64)(inside)


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        x = nn.Embed(1000, 64)(tokens)
        for _ in range(3):
            x = Block()(x)
        return nn.Dense(1000)(nn.LayerNorm()(x))


def test_linen_layers_one_after_the_other_share_their_classes() -> None:
    model = LanguageModel()

    def made(key: Any) -> Any:
        params = model.init(key, jnp.zeros((8, 32), int))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))

    def step(state: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return XENT(logits, tokens[:, 1:]).mean()

        value, slopes = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=slopes), value

    classes = found(step, (jax.eval_shape(made, jax.random.key(0)), i32(8, 33)), 1)
    dims = {one.name: one.dims for one in classes.arguments}
    for layer in range(3):
        block = f"[0].params['Block_{layer}']"
        for name, right in OF_SHAPE.items():
            assert dims[f"{block}['{name}']['kernel']"] == right
        attention = f"{block}['MultiHeadDotProductAttention_0']"
        assert dims[f"{attention}['query']['kernel']"] == ("embed", "heads", "head_dim")
        assert dims[f"{attention}['key']['kernel']"] == ("embed", "heads", "head_dim")
        assert dims[f"{attention}['out']['kernel']"][::2] == ("heads", "embed")
    assert dims["[0].params['Embed_0']['embedding']"] == ("vocab", "embed")
    # The labels are tokens of the same rows.
    assert dims["[0].params['Dense_0']['kernel']"] == ("embed", "vocab")
    sequence = classes.named("sequence")
    assert sequence.whole.startswith("33 = 3 * 11")
    assert sequence.cure == "give the step its slices of 32 as arrays of their own"
    roles = {one.name: one.role for one in classes.arguments}
    assert roles["[0].step"] == Role.COUNTER


class Images(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.second = nnx.Conv(32, 64, (3, 3), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.up = nnx.Linear(7 * 7 * 64, 256, rngs=rngs)
        self.out = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.avg_pool(nnx.relu(self.norm(self.first(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.second(x)), (2, 2), (2, 2)).reshape(x.shape[0], -1)
        return self.out(self.dropout(nnx.relu(self.up(x))))


def test_an_nnx_image_network_with_statistics_and_keys_in_its_state() -> None:
    model = Images(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state: Any, x: Any, y: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        value, slopes = nnx.value_and_grad(lambda model: XENT(model(x), y).mean())(model)
        optimizer.update(model, slopes)
        return nnx.state((model, optimizer)), value

    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    classes = found(step, (state, f32(32, 28, 28, 1), i32(32)), 1)

    def named(part: str) -> Any:
        return next(
            one for one in classes.arguments if part in one.name and one.name.startswith("[0][0]")
        )

    assert named("'norm']['mean'").role == named("'norm']['var'").role == Role.STATISTIC
    assert named("'norm']['scale'").role == Role.PARAMETER
    assert named("'key'").role == Role.KEY
    assert named("'norm']['mean'").dims == named("'first']['bias'").dims
    assert named("'second']['kernel'").dims[2] == named("'first']['kernel'").dims[3]
    assert named("'first']['kernel'").dims[:2] == ("kernel", "kernel")
    rows = classes.named(named("'up']['kernel'").dims[0])
    # 28 pixels are halved twice, and 7 of them are the outer part of the rows.
    assert (rows.size, rows.parts, rows.stored) == (7, 1, 3136)
    assert [one.name for one in classes.batches] == ["batch"]


def test_loops_that_equinox_defines_by_operations_of_its_own_are_followed() -> None:
    params, static = eqx.partition(eqx.nn.MLP(4, 4, 32, 2, key=jax.random.key(0)), eqx.is_array)

    def solved(model: Any, y: Any) -> Any:
        def turn(state: Any) -> Any:
            time, y = state
            slope = eqx.error_if(model(y), time > 9, "too late")
            return time + 0.1 * jnp.clip(jnp.abs(slope).max(), 0.1, 1), y + 0.1 * slope

        def goes_on(state: Any) -> Any:
            return state[0] < 1

        start = (jnp.zeros(()), y)
        return eqx.internal.while_loop(goes_on, turn, start, max_steps=16, kind="checkpointed")[1]

    def step(params: Any, opt: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            model = eqx.combine(params, static)
            return jnp.mean((jax.vmap(lambda one: solved(model, one))(x) - y) ** 2)

        value, slopes = jax.value_and_grad(loss)(params)
        updates, opt = ADAM.update(slopes, opt, params)
        return eqx.apply_updates(params, updates), opt, value

    args = (params, ADAM.init(params), f32(24, 4), f32(24, 4))
    count = len(jax.tree.leaves(args[:2]))
    program = without_shown(jax.jit(step).trace(*args).jaxpr)
    paths = jax.tree_util.tree_leaves_with_path(args)
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    classes = classes_of(program, carried={k: k for k in range(count)}, names=names)
    assert [(one.name, one.size) for one in classes.batches] == [("batch", 24)]
    dims = {one.name: one.dims for one in classes.arguments}
    assert dims["[2]"][0] == dims["[3]"][0] == "batch"
    assert not [one for one in classes.cautions if "is not known" in one.text]


class Cells(eqx.Module):
    table: eqx.nn.Embedding
    cell: eqx.nn.GRUCell
    head: eqx.nn.MLP

    def __init__(self, key: Any) -> None:
        self.table = eqx.nn.Embedding(100, 16, key=key)
        self.cell = eqx.nn.GRUCell(16, 32, key=key)
        self.head = eqx.nn.MLP(32, 10, 64, 2, key=key)

    def __call__(self, tokens: Any) -> Any:
        rows = jax.vmap(self.table)(tokens)
        last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(32), rows)
        return self.head(last)


def test_equinox_weights_have_what_comes_out_first() -> None:
    params, static = eqx.partition(Cells(jax.random.key(0)), eqx.is_array)

    def step(params: Any, opt: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return XENT(jax.vmap(eqx.combine(params, static))(x), y).mean()

        value, slopes = jax.value_and_grad(loss)(params)
        updates, opt = ADAM.update(slopes, opt, params)
        return eqx.apply_updates(params, updates), opt, value

    classes = found(step, (params, ADAM.init(params), i32(8, 24), i32(8)), 2)
    dims = {one.name: one.dims for one in classes.arguments}
    assert dims["[2]"] == ("batch", "time")
    assert dims["[3]"] == ("batch",)
    gates = classes.named(dims["[0].cell.weight_hh"][0])
    assert gates.pieces == (("hidden", 32),) * 3
    assert dims["[0].cell.weight_hh"][1] == "hidden"
    assert dims["[0].head.layers[0].weight"][1] == "hidden"
    first, second = (dims[f"[0].head.layers[{layer}].weight"] for layer in (0, 1))
    # Both are 64 wide, and are two classes: each could be split without the other.
    assert first[0] == second[1] != second[0]
    assert CautionKind.GRADIENT_IN_LOOP in {one.kind for one in classes.cautions}
