"""A vision transformer: patches by a convolution of stride 8, then blocks of attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from attention import attended, fed_forward, normed, weights
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_IMAGES, _SIDE, _PATCH, _WIDTH, _HEADS, _HIDDEN, _LAYERS, _CLASSES = 64, 64, 8, 128, 8, 512, 3, 64
_TOKENS = (_SIDE // _PATCH) ** 2


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""
    params = {
        "patch": abstract(mesh, (_PATCH, _PATCH, 3, _WIDTH), None, None, None, "fsdp"),
        "position": abstract(mesh, (_TOKENS, _WIDTH), None, "fsdp"),
        "blocks": [weights(mesh, _WIDTH, _HEADS, _HIDDEN) for _ in range(_LAYERS)],
        "head": abstract(mesh, (_WIDTH, _CLASSES), "fsdp", "tp"),
    }
    batch = {
        "images": abstract(mesh, (_IMAGES, _SIDE, _SIDE, 3), BATCH, None, None, None),
        "labels": abstract(mesh, (_IMAGES,), BATCH, dtype=jnp.int32),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        patches = jax.lax.conv_general_dilated(
            batch["images"],
            params["patch"],
            (_PATCH, _PATCH),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = patches.reshape(_IMAGES, _TOKENS, _WIDTH) + params["position"]
        x = split(mesh, x, BATCH, None, None)
        for block in params["blocks"]:
            x = x + attended(mesh, normed(x), block)
            x = x + fed_forward(mesh, normed(x), block)
        scores = jax.nn.log_softmax(jnp.mean(normed(x), axis=1) @ params["head"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["labels"][:, None], axis=-1))

    return trained(loss, params, batch)
