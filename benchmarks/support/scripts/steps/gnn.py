"""Message passing on a graph: gathers along edges, sums by receiving node (segment_sum).

Nodes and edges are split over dp and fsdp, the hidden units of both layers over tp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_NODES, _EDGES, _FEATURES, _HIDDEN, _CLASSES, _LAYERS = 4096, 16_384, 64, 128, 16, 3


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""
    layer = {
        "edge": abstract(mesh, (2 * _HIDDEN, _HIDDEN), "fsdp", "tp"),
        "out": abstract(mesh, (_HIDDEN, _HIDDEN), "tp", "fsdp"),
        "self": abstract(mesh, (_HIDDEN, _HIDDEN), "fsdp", None),
    }
    params = {
        "encode": abstract(mesh, (_FEATURES, _HIDDEN), "fsdp", None),
        "layers": [layer] * _LAYERS,
        "decode": abstract(mesh, (_HIDDEN, _CLASSES), "fsdp", None),
    }
    batch = {
        "nodes": abstract(mesh, (_NODES, _FEATURES), BATCH, None),
        "senders": abstract(mesh, (_EDGES,), BATCH, dtype=jnp.int32),
        "receivers": abstract(mesh, (_EDGES,), BATCH, dtype=jnp.int32),
        "labels": abstract(mesh, (_NODES,), BATCH, dtype=jnp.int32),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["nodes"] @ params["encode"])
        for one in params["layers"]:
            ends = jnp.concatenate([hidden[batch["senders"]], hidden[batch["receivers"]]], axis=-1)
            message = split(mesh, jax.nn.relu(ends @ one["edge"]), BATCH, "tp")
            summed = jax.ops.segment_sum(message @ one["out"], batch["receivers"], _NODES)
            hidden = split(mesh, jnp.tanh(hidden @ one["self"] + summed), BATCH, None)
        scores = jax.nn.log_softmax(hidden @ params["decode"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["labels"][:, None], axis=-1))

    return trained(loss, params, batch)
