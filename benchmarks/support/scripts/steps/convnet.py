"""A residual network: convolutions of stride 1 and 2, with padding, batch norm without state.

Images are split over dp and fsdp, output channels over tp, the larger side of weights over fsdp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_IMAGES, _SIDE, _WIDTHS, _CLASSES = 32, 32, (32, 64, 128), 64
_NUMBERS = ("NHWC", "HWIO", "NHWC")


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""

    def kernel(window: int, before: int, after: int) -> Any:
        return abstract(mesh, (window, window, before, after), None, None, "fsdp", "tp")

    blocks, before = [], _WIDTHS[0]
    for width in _WIDTHS:
        blocks.append(
            {
                "first": kernel(3, before, width),
                "second": kernel(3, width, width),
                "skip": kernel(1, before, width),
                "scale": abstract(mesh, (width,), "tp"),
            }
        )
        before = width
    params = {
        "stem": abstract(mesh, (3, 3, 3, _WIDTHS[0]), None, None, None, "tp"),
        "blocks": blocks,
        "head": abstract(mesh, (before, _CLASSES), "fsdp", "tp"),
    }
    batch = {
        "images": abstract(mesh, (_IMAGES, _SIDE, _SIDE, 3), BATCH, None, None, None),
        "labels": abstract(mesh, (_IMAGES,), BATCH, dtype=jnp.int32),
    }

    def convolve(x: jax.Array, weights: jax.Array, stride: int = 1) -> jax.Array:
        found = jax.lax.conv_general_dilated(
            x, weights, (stride, stride), "SAME", dimension_numbers=_NUMBERS
        )
        return split(mesh, found, BATCH, None, None, "tp")

    def normed(x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=(0, 1, 2))
        variance = jnp.mean(jnp.square(x - mean), axis=(0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = jax.nn.relu(convolve(batch["images"], params["stem"]))
        for block in params["blocks"]:
            inner = jax.nn.relu(normed(convolve(x, block["first"], 2)))
            inner = normed(convolve(inner, block["second"])) * block["scale"]
            x = jax.nn.relu(inner + convolve(x, block["skip"], 2))
        scores = jax.nn.log_softmax(jnp.mean(x, axis=(1, 2)) @ params["head"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["labels"][:, None], axis=-1))

    return trained(loss, params, batch)
