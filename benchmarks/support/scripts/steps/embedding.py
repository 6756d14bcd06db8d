"""A recommender: bags of ids looked up in large tables, whose gradient is a scatter.

The rows of the tables are split over fsdp and tp, the batch over dp and fsdp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_TABLES, _ROWS, _WIDTH, _BATCH, _BAG, _HIDDEN = 4, 32_768, 64, 1024, 8, 256


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""
    params = {
        "tables": [abstract(mesh, (_ROWS, _WIDTH), ("fsdp", "tp"), None) for _ in range(_TABLES)],
        "up": abstract(mesh, (_TABLES * _WIDTH, _HIDDEN), "fsdp", "tp"),
        "down": abstract(mesh, (_HIDDEN, 1), "tp", None),
    }
    batch = {
        "ids": abstract(mesh, (_TABLES, _BATCH, _BAG), None, BATCH, None, dtype=jnp.int32),
        "clicked": abstract(mesh, (_BATCH,), BATCH),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        bags = [
            jnp.mean(table[ids], axis=1)
            for table, ids in zip(params["tables"], batch["ids"], strict=True)
        ]
        features = split(mesh, jnp.concatenate(bags, axis=-1), BATCH, None)
        logits = (jax.nn.relu(features @ params["up"]) @ params["down"])[:, 0]
        return jnp.mean(jnp.logaddexp(0.0, logits) - batch["clicked"] * logits)

    return trained(loss, params, batch)
