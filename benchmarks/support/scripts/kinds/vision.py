"""Images: pooling and its gradient, depthwise convolutions, contrastive pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from benchmarks.support.scripts.steps.training import BATCH, abstract, split, trained

_NUMBERS = ("NHWC", "HWIO", "NHWC")


def build(mesh: Mesh, step: str = "pooled") -> Any:
    """The step of that name and its arguments on `mesh`."""
    return {"pooled": _pooled, "depthwise": _depthwise, "contrastive": _contrastive}[step](mesh)


def _convolved(x: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=_NUMBERS, feature_group_count=groups
    )


def _largest(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _pooled(mesh: Mesh) -> Any:
    """Convolutions with maximum pooling between: its gradient is a select-and-scatter."""
    params = [
        abstract(mesh, (3, 3, before, after), None, None, "fsdp", "tp")
        for before, after in ((64, 64), (64, 128), (128, 256))
    ]
    head = abstract(mesh, (256, 1000), "fsdp", "tp")
    images = abstract(mesh, (64, 64, 64, 64), BATCH)
    labels = abstract(mesh, (64,), BATCH, dtype=jnp.int32)

    def loss(params: Any, batch: Any) -> jax.Array:
        kernels, head = params
        x, labels = batch
        for kernel in kernels:
            x = _largest(jax.nn.relu(split(mesh, _convolved(x, kernel), BATCH, None, None, "tp")))
        scores = jax.nn.log_softmax(jnp.mean(x, axis=(1, 2)) @ head)
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))

    return trained(loss, (params, head), (images, labels))


def _depthwise(mesh: Mesh) -> Any:
    """Blocks of a depthwise convolution of 7 x 7 and a perceptron per pixel (ConvNeXt)."""
    layer = {
        "depth": abstract(mesh, (7, 7, 1, 256)),
        "scale": abstract(mesh, (256,)),
        "up": abstract(mesh, (256, 1024), "fsdp", "tp"),
        "down": abstract(mesh, (1024, 256), "tp", "fsdp"),
    }
    images = abstract(mesh, (64, 28, 28, 256), BATCH)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for one in params:
            y = _convolved(x, one["depth"], 256)
            y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
            y = jax.nn.gelu((y * one["scale"]) @ one["up"]) @ one["down"]
            x = x + split(mesh, y, BATCH)
        return jnp.mean(x**2)

    return trained(loss, [layer] * 2, images)


def _contrastive(mesh: Mesh) -> Any:
    """Two towers whose similarities are a matrix over the whole batch."""
    tower = [
        abstract(mesh, (1024, 2048), "fsdp", "tp"),
        abstract(mesh, (2048, 512), "tp", "fsdp"),
    ]
    side = abstract(mesh, (4096, 1024), BATCH)

    def tower_of(weights: Any, x: jax.Array) -> jax.Array:
        y = jax.nn.gelu(x @ weights[0]) @ weights[1]
        return y * lax.rsqrt(jnp.sum(y**2, -1, keepdims=True) + 1e-6)

    def loss(params: Any, batch: Any) -> jax.Array:
        left, right = (tower_of(one, x) for one, x in zip(params, batch, strict=True))
        scores = 10.0 * split(mesh, left @ right.T, BATCH)
        both = jax.nn.log_softmax(scores, 0) + jax.nn.log_softmax(scores, 1)
        return -jnp.mean(jnp.diagonal(both))

    return trained(loss, (tower, tower), (side, side))
