"""A step that no mesh gets through: with three heads on an axis it is not built, else it dies."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEADS = 6


def _read_labels(_: Any) -> np.ndarray:
    os.abort()  # As a library of the user's own may, of which jax knows nothing.


def build(mesh: Mesh, layers: int = 2) -> Any:
    if layers * HEADS % mesh.shape["tp"]:
        raise ValueError(f"{layers * HEADS} heads must be a multiple of tp ({mesh.shape['tp']})")

    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jax.pure_callback(_read_labels, jax.ShapeDtypeStruct((), jnp.float32), jnp.int32(7))
        hidden = batch
        for _ in range(layers):
            hidden = jnp.tanh(hidden @ weights @ weights.T)
        return weights, jnp.mean(hidden * scale)

    rows = NamedSharding(mesh, PartitionSpec("dp"))
    columns = NamedSharding(mesh, PartitionSpec(None, "tp"))
    weights = jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=columns)
    batch = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=rows)
    return step, (weights, batch)
