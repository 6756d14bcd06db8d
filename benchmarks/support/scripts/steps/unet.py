"""A U-Net block whose rows of pixels are split over tp: convolutions that need halos.

Images are split over dp and fsdp; going up is a transposed convolution (dilated input).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_IMAGES, _SIDE, _WIDTH = 16, 64, 16
_NUMBERS = ("NHWC", "HWIO", "NHWC")


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""

    def kernel(window: int, before: int, after: int) -> Any:
        return abstract(mesh, (window, window, before, after), None, None, None, "fsdp")

    params = {
        "in": kernel(3, 4, _WIDTH),
        "down": kernel(3, _WIDTH, 2 * _WIDTH),
        "middle": kernel(3, 2 * _WIDTH, 2 * _WIDTH),
        "up": kernel(2, 2 * _WIDTH, _WIDTH),
        "out": kernel(3, 2 * _WIDTH, 8),
    }
    batch = {
        "noisy": abstract(mesh, (_IMAGES, _SIDE, _SIDE, 4), BATCH, "tp", None, None),
        "noise": abstract(mesh, (_IMAGES, _SIDE, _SIDE, 8), BATCH, "tp", None, None),
    }

    def convolve(x: jax.Array, weights: jax.Array, stride: int = 1) -> jax.Array:
        found = jax.lax.conv_general_dilated(
            x, weights, (stride, stride), "SAME", dimension_numbers=_NUMBERS
        )
        return split(mesh, found, BATCH, "tp", None, None)

    def loss(params: Any, batch: Any) -> jax.Array:
        outer = jax.nn.silu(convolve(batch["noisy"], params["in"]))
        inner = jax.nn.silu(convolve(outer, params["down"], 2))
        inner = jax.nn.silu(convolve(inner, params["middle"]))
        raised = jax.lax.conv_transpose(
            inner, params["up"], (2, 2), "SAME", dimension_numbers=_NUMBERS
        )
        both = jnp.concatenate([outer, split(mesh, raised, BATCH, "tp", None, None)], axis=-1)
        return jnp.mean(jnp.square(convolve(both, params["out"]) - batch["noise"]))

    return trained(loss, params, batch)
