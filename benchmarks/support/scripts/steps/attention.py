"""Blocks of attention without a causal mask that the vision and the diffusion transformer share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from training import BATCH, abstract, split


def weights(mesh: Mesh, width: int, heads: int, hidden: int) -> dict[str, Any]:
    """Those of one block: heads and hidden units over tp, the width over fsdp."""
    size = width // heads
    return {
        "qkv": abstract(mesh, (width, 3, heads, size), "fsdp", None, "tp", None),
        "out": abstract(mesh, (heads, size, width), "tp", None, "fsdp"),
        "up": abstract(mesh, (width, hidden), "fsdp", "tp"),
        "down": abstract(mesh, (hidden, width), "tp", "fsdp"),
    }


def normed(x: jax.Array) -> jax.Array:
    """Layer norm without parameters."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-6)


def attended(mesh: Mesh, x: jax.Array, block: dict[str, Any]) -> jax.Array:
    """Self-attention of [rows, length, width]."""
    query, key, value = jnp.moveaxis(jnp.einsum("blw,wthd->btlhd", x, block["qkv"]), 1, 0)
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key) * query.shape[-1] ** -0.5
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), value)
    return split(mesh, jnp.einsum("blhd,hdw->blw", mixed, block["out"]), BATCH, None, None)


def fed_forward(mesh: Mesh, x: jax.Array, block: dict[str, Any]) -> jax.Array:
    """The perceptron of a block."""
    hidden = split(mesh, jax.nn.gelu(x @ block["up"]), BATCH, None, "tp")
    return split(mesh, hidden @ block["down"], BATCH, None, None)
