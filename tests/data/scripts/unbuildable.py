"""A step that no mesh gets through: with tp it cannot be built, without it the run fails."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

HEADS = 6


def _read_labels(count: np.ndarray) -> np.ndarray:
    raise FileNotFoundError(f"labels-{int(count):05}.npy: no such shard of the labels")


def build(mesh: Mesh) -> Any:
    if HEADS % mesh.shape["tp"]:
        raise ValueError(f"heads ({HEADS}) must be a multiple of tp ({mesh.shape['tp']})")

    def step(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        labels = jax.pure_callback(
            _read_labels, jax.ShapeDtypeStruct((), jnp.float32), jnp.int32(7)
        )
        return weights, jnp.mean(batch @ weights) - labels

    rows = NamedSharding(mesh, PartitionSpec("dp"))
    whole = NamedSharding(mesh, PartitionSpec())
    weights = jax.ShapeDtypeStruct((256, HEADS), jnp.float32, sharding=whole)
    batch = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=rows)
    return step, (weights, batch)
