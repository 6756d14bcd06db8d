"""Rules of operations: dimensions of results have their sizes, and join what must agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from automesh.program.infer.classes import classes_of
from automesh.program.infer.dimensions import Dim, DimensionMark, Dimensions, Dims
from automesh.program.infer.nouns import CautionKind
from automesh.program.infer.operation import ArrayOrigin, TracedOperation
from automesh.program.infer.walk import RULES, Walked, walk
from tests.support.infer_models import f32, i32

NHWC = ("NHWC", "HWIO", "NHWC")


def walked(function: Callable[..., Any], *args: Any) -> Walked:
    closed = jax.make_jaxpr(function)(*args)
    return walk(closed, [ArrayOrigin.DATA] * len(closed.jaxpr.invars), num_held=0)


def size(every: Dimensions, dim: Dim) -> int:
    return every.size_of(every.factors(dim))


def _conv(stride: int, padding: str, groups: int = 1, batch_groups: int = 1) -> Any:
    return lambda x, w: lax.conv_general_dilated(
        x,
        w,
        (stride, stride),
        padding,
        dimension_numbers=NHWC,
        feature_group_count=groups,
        batch_group_count=batch_groups,
    )


def _loop(x: Any) -> Any:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


def _vmapped_loop(x: Any) -> Any:
    return jax.vmap(lambda r: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, r))(x)


OPERATIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "outer": (lambda x, y: x[:, None] + y, (f32(4), f32(6))),
    "einsum": (lambda x, y: jnp.einsum("abc,cbd->dab", x, y), (f32(2, 3, 4), f32(4, 3, 5))),
    "merge": (lambda x: x.reshape(6, 20).reshape(2, 60), (f32(2, 3, 4, 5),)),
    "tangle": (lambda x: x.reshape(8, 3), (f32(6, 4),)),
    "empty": (lambda x: x[:0].reshape(3, 0), (f32(4, 3),)),
    "ones": (lambda x: x.reshape(1, 4, 1, 6, 1).squeeze(0), (f32(4, 6),)),
    "tile": (lambda x: jnp.tile(x, (2, 3)), (f32(4, 5),)),
    "repeat": (lambda x: jnp.repeat(x, 3, 1), (f32(4, 5),)),
    "stack": (lambda x, y: jnp.stack([x, y], 1), (f32(4, 5), f32(4, 5))),
    "unstack": (lambda x: list(jnp.unstack(x, axis=1)), (f32(4, 3),)),
    "split": (lambda x: jnp.split(x, [2, 5], 1), (f32(4, 8),)),
    "strided": (lambda x: x[::2, 1::3], (f32(8, 9),)),
    "pad": (lambda x: lax.pad(x, 0.0, ((1, 2, 0), (0, -1, 0), (0, 0, 1))), (f32(2, 3, 4),)),
    "roll": (lambda x: jnp.roll(x, 1, 0) + jnp.flip(x, 1), (f32(4, 5),)),
    "sort": (lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1)), (f32(4, 5),)),
    "top_k": (lambda x: lax.top_k(x, 3), (f32(4, 8),)),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (f32(4, 5),)),
    "argmax": (lambda x: jnp.argmax(x, 1), (f32(4, 5),)),
    "reduce": (lambda x: lax.reduce(x, 0.0, lax.add, (1,)), (f32(4, 5, 6),)),
    "take": (lambda x, i: x[i], (f32(9, 5), i32(3, 4))),
    "take_along": (lambda x, i: jnp.take_along_axis(x, i, 1), (f32(4, 9), i32(4, 3))),
    "two_indices": (lambda x, i, j: x[i, :, j], (f32(4, 9, 5), i32(3), i32(3))),
    "windows": (lambda x, i: lax.dynamic_slice_in_dim(x, i, 3, 1), (f32(4, 9), i32())),
    "put": (lambda x, i, u: x.at[i].add(u), (f32(9, 5), i32(3), f32(3, 5))),
    "put_slice": (lambda x, u: lax.dynamic_update_slice(x, u, (0, 1)), (f32(4, 9), f32(4, 3))),
    "conv": (_conv(1, "SAME"), (f32(2, 8, 8, 4), f32(3, 3, 4, 6))),
    "conv_strided": (_conv(2, "SAME"), (f32(2, 8, 8, 4), f32(3, 3, 4, 6))),
    "conv_patches": (_conv(4, "VALID"), (f32(2, 8, 8, 4), f32(4, 4, 4, 6))),
    "conv_grouped": (_conv(1, "SAME", 2), (f32(2, 8, 8, 4), f32(3, 3, 2, 6))),
    "conv_depthwise": (_conv(1, "SAME", 4), (f32(2, 8, 8, 4), f32(3, 3, 1, 8))),
    "conv_batches": (_conv(1, "SAME", 1, 2), (f32(4, 8, 8, 3), f32(3, 3, 3, 6))),
    "conv_transposed": (
        lambda x, w: lax.conv_transpose(x, w, (2, 2), "VALID", dimension_numbers=NHWC),
        (f32(2, 8, 8, 4), f32(2, 2, 4, 6)),
    ),
    "pool": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (f32(2, 8, 8, 4),),
    ),
    "fft": (lambda x: jnp.fft.rfft(x), (f32(4, 16),)),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.mT), (f32(3, 4, 4),)),
    "svd": (lambda x: jnp.linalg.svd(x), (f32(3, 4, 4),)),
    "ragged": (
        lambda x, w, g: lax.ragged_dot(x, w, g),
        (f32(8, 5), f32(3, 5, 7), i32(3)),
    ),
    "cast": (lambda x: lax.bitcast_convert_type(x, jnp.uint8), (f32(4, 5),)),
    "while": (_loop, (f32(4, 5),)),
    "vmapped_while": (_vmapped_loop, (f32(4, 5),)),
    "cond": (lambda x: lax.cond(x.sum() > 0, lambda x: x.T @ x, lambda x: x[:5, :5] * 1.0, x),
             (f32(8, 5),)),
    "keys": (lambda x: jax.random.normal(jax.random.key(x[0]), (4, 5)), (i32(3),)),
    "permutation": (lambda x: jax.random.permutation(jax.random.key(0), x), (f32(8, 3),)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_have_their_sizes(name: str) -> None:
    function, args = OPERATIONS[name]
    found = walked(function, *args)
    results = jax.tree.leaves(jax.eval_shape(function, *args))
    assert len(results) == len(found.outputs)
    for result, dims in zip(results, found.outputs, strict=True):
        sizes = [size(found.all, dim) for dim in dims]
        assert sizes == [one or 1 for one in result.shape]
    assert not found.events.unknown


# Batches in groups are the gradient of features in groups; nobody takes that of it in turn.
CONVOLUTIONS = [one for one in OPERATIONS if one.startswith("conv") and one != "conv_batches"]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_convolutions_agree_with_what_they_are_of(name: str) -> None:
    function, args = OPERATIONS[name]

    def slopes(x: Any, w: Any) -> Any:
        return jax.grad(lambda x, w: jnp.sum(function(x, w) ** 2), (0, 1))(x, w)

    found = walked(slopes, *args)
    # Rows and features; the places of a kernel and those of its gradient meet in the update.
    places = ((0, 3), (2, 3))
    for own, dims, result in zip(places, found.inputs, found.outputs, strict=True):
        for place in own:
            assert found.all.factors(dims[place])[:1] == found.all.factors(result[place])[:1]


def test_a_depthwise_convolution_ties_what_goes_in_to_what_comes_out() -> None:
    function, args = OPERATIONS["conv_depthwise"]
    found = walked(function, *args)
    features = found.all.factors(found.inputs[0][3])
    assert found.all.factors(found.outputs[0][3])[:1] == features
    assert found.all.size_of(features) == 4


def test_a_window_that_keeps_all_places_keeps_the_dimension() -> None:
    same = walked(*_args("conv"))
    assert same.all.factors(same.inputs[0][1]) == same.all.factors(same.outputs[0][1])
    strided = walked(*_args("conv_strided"))
    assert strided.all.factors(strided.inputs[0][1]) != strided.all.factors(strided.outputs[0][1])
    patches = walked(*_args("conv_patches"))
    # Of 8 pixels in patches of 4, the outer part.
    assert (
        patches.all.factors(patches.inputs[0][1])[0]
        == patches.all.factors(patches.outputs[0][1])[0]
    )


def _args(name: str) -> tuple[Any, ...]:
    function, args = OPERATIONS[name]
    return (function, *args)


def test_equal_sizes_join_nothing() -> None:
    found = walked(lambda x, w: x @ w, f32(8, 8), f32(8, 8))
    rows, summed = (found.all.factors(dim) for dim in found.inputs[0])
    again, columns = (found.all.factors(dim) for dim in found.inputs[1])
    assert summed == again
    assert len({rows, summed, columns}) == 3


def test_what_is_not_known_stays_whole_and_is_told() -> None:
    def doubled(x: Any) -> Any:
        return jax.pure_callback(
            lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )

    def step(w: Any, x: Any) -> Any:
        value, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * slope, value + doubled(x).sum()

    traced = jax.jit(step).trace(f32(4, 6), f32(8, 4))
    found = classes_of(traced.jaxpr, carried={0: 0}, names=["w", "x"])
    for name in found.arguments[1].dims:
        assert "rules are not known" in found.named(name).whole
    assert not found.named(found.arguments[0].dims[1]).whole
    (said,) = [one for one in found.cautions if one.kind == CautionKind.UNKNOWN_OPERATION]
    assert "pure_callback" in said.text


def test_an_operation_with_other_parameters_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(op: TracedOperation) -> list[Dims]:
        return [op.params["no such parameter"]]

    monkeypatch.setitem(RULES, "cumsum", changed)
    found = walked(lambda x: jnp.cumsum(x, 1) + 1, f32(4, 5))
    assert found.events.unknown == {"cumsum": 1}
    assert all(
        found.all.marks(factor) & DimensionMark.UNKNOWN
        for dim in (*found.inputs[0], *found.outputs[0])
        for factor in found.all.factors(dim)
    )
    # One that gives an array of another rank is as wrong.
    monkeypatch.setitem(RULES, "cumsum", lambda op: [op.ins[0][:1]])
    assert walked(lambda x: jnp.cumsum(x, 1), f32(4, 5)).events.unknown == {"cumsum": 1}


def test_a_loop_walks_over_what_it_slices() -> None:
    found = walked(lambda x: lax.scan(lambda c, one: (c + one, c), jnp.zeros(4), x), f32(6, 4))
    steps, rows = found.inputs[0]
    assert found.all.marks(found.all.factors(steps)[0]) & DimensionMark.WALKED
    carried, slices = found.outputs
    assert found.all.factors(carried[0]) == found.all.factors(rows)
    assert found.all.factors(slices[0]) == found.all.factors(steps)
    assert found.all.factors(slices[1]) == found.all.factors(rows)
