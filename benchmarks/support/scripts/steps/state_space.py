"""A state-space layer: a linear recurrence by `associative_scan`, and a causal convolution.

Sequences are split over dp and fsdp, channels over tp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_SEQUENCES, _LENGTH, _WIDTH, _CHANNELS, _WINDOW, _LAYERS = 32, 128, 128, 256, 4, 2


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""
    layer = {
        "in": abstract(mesh, (_WIDTH, 3, _CHANNELS), "fsdp", None, "tp"),
        "window": abstract(mesh, (_WINDOW, 1, _CHANNELS), None, None, "tp"),
        "decay": abstract(mesh, (_CHANNELS,), "tp"),
        "out": abstract(mesh, (_CHANNELS, _WIDTH), "tp", "fsdp"),
    }
    params = [layer] * _LAYERS
    batch = abstract(mesh, (_SEQUENCES, _LENGTH, _WIDTH), BATCH, None, None)

    def joined(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def run(layer: Any, x: jax.Array) -> jax.Array:
        value, gate, step = jnp.moveaxis(jnp.einsum("blw,wtc->btlc", x, layer["in"]), 1, 0)
        value = jax.lax.conv_general_dilated(
            value,
            layer["window"],
            (1,),
            [(_WINDOW - 1, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=_CHANNELS,
        )
        step = jax.nn.softplus(step)
        kept = jnp.exp(-step * jnp.exp(layer["decay"]))
        _, states = jax.lax.associative_scan(joined, (kept, step * value), axis=1)
        states = split(mesh, states * jax.nn.silu(gate), BATCH, None, "tp")
        return split(mesh, states @ layer["out"], BATCH, None, None)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch
        for layer in params:
            x = x + run(layer, x)
        return jnp.mean(jnp.square(x[:, :-1] - batch[:, 1:]))

    return trained(loss, params, batch)
