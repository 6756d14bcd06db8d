"""Operations of one array that is split along one dimension, each as people write it in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Attributes:
    work: from the array to what is summed up, so that the whole of it is needed.
    shape: of the array, float32.
    split: the dimension that is split.
    """

    work: Callable[[Any], Any]
    shape: tuple[int, ...]
    split: int = 0


_ROWS = (1024, 512)
_IMAGES = (8, 64, 64, 16)
_MATRICES = (16, 64, 64)


def _gated(x: Any) -> Any:
    gate, up = jnp.split(x, 2, axis=1)
    return jax.nn.silu(gate) * up


def _attention(x: Any) -> Any:
    query, key, value = (one.reshape(4, 64, 8, 16) for one in jnp.split(x, 3, axis=2))
    scores = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", query, key))
    return jnp.einsum("bhts,bshd->bthd", scores, value)


def _rotary(x: Any) -> Any:
    return jnp.concatenate([-x[:, 256:], x[:, :256]], axis=1)


def _pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def _convolved(x: Any) -> Any:
    kernel = jnp.ones((3, 3, 16, 16))
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _scanned(x: Any) -> Any:
    return lax.scan(lambda h, row: (jnp.tanh(h + row), None), jnp.zeros(512), x)[0]


def _gradient(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(lambda x: jnp.sum(jnp.sin(work(x))))


SAMPLES: dict[str, Sample] = {
    "slice: first half": Sample(work=lambda x: x[:512], shape=_ROWS),
    "slice: second half": Sample(work=lambda x: x[512:], shape=_ROWS),
    "slice: middle third": Sample(work=lambda x: x[512:1024], shape=(1536, 512)),
    "slice: every second row": Sample(work=lambda x: x[::2], shape=_ROWS),
    "slice: gradient": Sample(work=_gradient(lambda x: x[:512]), shape=_ROWS),
    "split: gate and up": Sample(work=_gated, shape=_ROWS, split=1),
    "split: gate and up, gradient": Sample(work=_gradient(_gated), shape=_ROWS, split=1),
    "split: query, key, value": Sample(work=_attention, shape=(4, 64, 384), split=2),
    "rotary halves": Sample(work=_rotary, shape=_ROWS, split=1),
    "difference of rows": Sample(work=lambda x: x[1:] - x[:-1], shape=_ROWS),
    "reverse": Sample(work=lambda x: jnp.flip(x, 0), shape=_ROWS),
    "roll by one": Sample(work=lambda x: jnp.roll(x, 1, 0), shape=_ROWS),
    "roll by 300": Sample(work=lambda x: jnp.roll(x, 300, 0), shape=_ROWS),
    "roll of windows": Sample(work=lambda x: jnp.roll(x, (-4, -4), (1, 2)), shape=_IMAGES, split=1),
    "stencil": Sample(work=lambda x: jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) - 2 * x, shape=_ROWS),
    "pad": Sample(work=lambda x: jnp.pad(x, ((8, 8), (0, 0))), shape=_ROWS),
    "pad: by half": Sample(work=lambda x: jnp.pad(x, ((512, 512), (0, 0))), shape=_ROWS),
    "pad: edges": Sample(
        work=lambda x: jnp.pad(x, ((1, 1), (0, 0)), mode="edge")[1:-1], shape=_ROWS
    ),
    "concatenate": Sample(work=lambda x: jnp.concatenate([x * 2, x]), shape=_ROWS),
    "tile": Sample(work=lambda x: jnp.tile(x, (2, 1)), shape=_ROWS),
    "repeat": Sample(work=lambda x: jnp.repeat(x, 2, axis=0), shape=_ROWS),
    "running sum": Sample(work=lambda x: jnp.cumsum(x, axis=0), shape=_ROWS),
    "running sum of whole rows": Sample(work=lambda x: jnp.cumsum(x, axis=1), shape=_ROWS),
    "running maximum": Sample(work=lambda x: lax.cummax(x, axis=0), shape=_ROWS),
    "associative scan": Sample(
        work=lambda x: lax.associative_scan(jnp.multiply, x, axis=0), shape=_ROWS
    ),
    "scan over rows": Sample(work=_scanned, shape=_ROWS),
    "map over rows": Sample(work=lambda x: lax.map(jnp.tanh, x), shape=_ROWS),
    "top k of whole rows": Sample(work=lambda x: lax.top_k(x, 5)[0], shape=_ROWS),
    "top k along the split": Sample(work=lambda x: lax.top_k(x, 5)[0], shape=_ROWS, split=1),
    "sort along the split": Sample(work=lambda x: jnp.sort(x, axis=0), shape=_ROWS),
    "order along the split": Sample(work=lambda x: jnp.argsort(x, axis=0), shape=_ROWS),
    "median": Sample(work=lambda x: jnp.median(x, axis=0), shape=_ROWS),
    "largest index": Sample(work=lambda x: jnp.argmax(x, axis=0), shape=_ROWS),
    "histogram": Sample(work=lambda x: jnp.histogram(x, bins=16)[0], shape=_ROWS),
    "rows at constant places": Sample(work=lambda x: x[jnp.arange(100) * 7], shape=_ROWS),
    "rows at places in the data": Sample(
        work=lambda x: jnp.take(x, jnp.int32(jnp.abs(x[:, 0])) % 1024, axis=0), shape=_ROWS
    ),
    "sum by segments": Sample(
        work=lambda x: jax.ops.segment_sum(x, jnp.arange(1024) // 16, num_segments=64),
        shape=_ROWS,
    ),
    "add at places in the data": Sample(
        work=lambda x: jnp.zeros((64, 512)).at[jnp.int32(jnp.abs(x[:, 0])) % 64].add(x),
        shape=_ROWS,
    ),
    "rows from a place in the data": Sample(
        work=lambda x: lax.dynamic_slice(x, (jnp.int32(x[0, 0]), 0), (64, 512)), shape=_ROWS
    ),
    "rows written at a place in the data": Sample(
        work=lambda x: lax.dynamic_update_slice(x, x[:8] * 2, (jnp.int32(x[0, 0]), 0)),
        shape=_ROWS,
    ),
    "permutation": Sample(work=lambda x: jax.random.permutation(jax.random.key(0), x), shape=_ROWS),
    "fft of whole rows": Sample(work=lambda x: jnp.abs(jnp.fft.fft(x, axis=1)), shape=_ROWS),
    "fft along the split": Sample(work=lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), shape=_ROWS),
    "reshape: merged": Sample(work=lambda x: x.reshape(-1), shape=_ROWS, split=1),
    "reshape: transposed": Sample(work=lambda x: x.T.reshape(256, 2048), shape=_ROWS),
    "pixel shuffle": Sample(
        work=lambda x: (
            x.reshape(8, 64, 64, 4, 2, 2).transpose(0, 1, 4, 2, 5, 3).reshape(8, 128, 128, 4)
        ),
        shape=_IMAGES,
        split=1,
    ),
    "windows of an image": Sample(
        work=lambda x: x.reshape(8, 8, 8, 8, 8, 16).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 64, 16),
        shape=_IMAGES,
        split=1,
    ),
    "pooling": Sample(work=_pooled, shape=_IMAGES, split=1),
    "pooling: gradient": Sample(work=_gradient(_pooled), shape=_IMAGES, split=1),
    "pooling of rows": Sample(
        work=lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"), shape=_ROWS
    ),
    "convolution": Sample(work=_convolved, shape=_IMAGES, split=1),
    "resize: nearest": Sample(
        work=lambda x: jax.image.resize(x, (8, 128, 128, 16), "nearest"), shape=_IMAGES, split=1
    ),
    "resize: bilinear": Sample(
        work=lambda x: jax.image.resize(x, (2048, 512), "bilinear"), shape=_ROWS
    ),
    "masked product": Sample(work=lambda x: jnp.tril(x @ x.T), shape=(512, 256)),
    "qr": Sample(work=lambda x: jnp.linalg.qr(x)[1], shape=(1024, 256)),
    "qr of a batch": Sample(work=lambda x: jnp.linalg.qr(x)[1], shape=_MATRICES),
    "eigenvalues of a batch": Sample(work=lambda x: jnp.linalg.eigh(x)[0], shape=_MATRICES),
    "inverses of a batch": Sample(work=jnp.linalg.inv, shape=_MATRICES),
}
