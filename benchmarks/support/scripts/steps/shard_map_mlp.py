"""A perceptron whose collectives the script states: `shard_map` with psum and all_gather.

Rows are split over dp and fsdp; weights are gathered over fsdp, hidden units split over tp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from training import BATCH, abstract, trained

_ROWS, _WIDTH, _HIDDEN, _LAYERS = 1024, 256, 1024, 3


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""
    layer = {
        "up": abstract(mesh, (_WIDTH, _HIDDEN), "fsdp", "tp"),
        "down": abstract(mesh, (_HIDDEN, _WIDTH), "tp", "fsdp"),
    }
    params = [layer] * _LAYERS
    batch = abstract(mesh, (_ROWS, _WIDTH), BATCH, None)

    def forward(layer: Any, x: jax.Array) -> jax.Array:
        up = jax.lax.all_gather(layer["up"], "fsdp", axis=0, tiled=True)
        down = jax.lax.all_gather(layer["down"], "fsdp", axis=1, tiled=True)
        return x + jax.lax.psum(jax.nn.relu(x @ up) @ down, "tp")

    mapped = jax.shard_map(
        forward,
        mesh=mesh,
        in_specs=({"up": P("fsdp", "tp"), "down": P("tp", "fsdp")}, P(BATCH, None)),
        out_specs=P(BATCH, None),
    )

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch
        for one in params:
            x = mapped(one, x)
        return jnp.mean(jnp.square(x - batch))

    return trained(loss, params, batch)
