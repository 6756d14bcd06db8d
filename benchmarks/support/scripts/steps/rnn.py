"""A recurrent network (GRU): a loop over time whose body multiplies small matrices.

Sequences are split over dp and fsdp, hidden units over tp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_SEQUENCES, _LENGTH, _FEATURES, _HIDDEN, _CLASSES = 64, 64, 64, 256, 64


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""
    params = {
        "input": abstract(mesh, (_FEATURES, 3, _HIDDEN), "fsdp", None, "tp"),
        "recurrent": abstract(mesh, (_HIDDEN, 3, _HIDDEN), "fsdp", None, "tp"),
        "bias": abstract(mesh, (3, _HIDDEN), None, "tp"),
        "head": abstract(mesh, (_HIDDEN, _CLASSES), "tp", "fsdp"),
    }
    batch = {
        "x": abstract(mesh, (_SEQUENCES, _LENGTH, _FEATURES), BATCH, None, None),
        "y": abstract(mesh, (_SEQUENCES,), BATCH, dtype=jnp.int32),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        def cell(hidden: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            given = jnp.einsum("bf,fgh->bgh", x, params["input"]) + params["bias"]
            held = jnp.einsum("bh,hgk->bgk", hidden, params["recurrent"])
            reset, update = jax.nn.sigmoid(given[:, 0] + held[:, 0]), given[:, 1] + held[:, 1]
            new = jnp.tanh(given[:, 2] + reset * held[:, 2])
            update = jax.nn.sigmoid(update)
            return split(mesh, update * hidden + (1.0 - update) * new, BATCH, "tp"), None

        start = split(mesh, jnp.zeros((_SEQUENCES, _HIDDEN)), BATCH, "tp")
        last, _ = jax.lax.scan(cell, start, jnp.swapaxes(batch["x"], 0, 1))
        scores = jax.nn.log_softmax(last @ params["head"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], axis=-1))

    return trained(loss, params, batch)
