"""A diffusion transformer: the timestep modulates every block; noise is drawn in the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from attention import attended, fed_forward, normed, weights
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_ROWS, _TOKENS, _PATCH, _WIDTH, _HEADS, _HIDDEN, _LAYERS = 64, 64, 16, 128, 8, 512, 3


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""
    block = weights(mesh, _WIDTH, _HEADS, _HIDDEN) | {
        "modulate": abstract(mesh, (_WIDTH, 6, _WIDTH), "fsdp", None, None)
    }
    params = {
        "in": abstract(mesh, (_PATCH, _WIDTH), None, "fsdp"),
        "time": abstract(mesh, (_WIDTH, _WIDTH), "fsdp", "tp"),
        "blocks": jax.tree.map(
            lambda one: abstract(mesh, (_LAYERS, *one.shape), None, *one.sharding.spec), block
        ),
        "out": abstract(mesh, (_WIDTH, _PATCH), "fsdp", None),
    }
    batch = {
        "latents": abstract(mesh, (_ROWS, _TOKENS, _PATCH), BATCH, None, None),
        "seed": abstract(mesh, (), dtype=jnp.uint32),
    }

    def loss(params: Any, batch: Any) -> jax.Array:
        drawn = jax.random.split(jax.random.key(batch["seed"]))
        latents = batch["latents"]
        noise = split(mesh, jax.random.normal(drawn[0], latents.shape), BATCH, None, None)
        time = split(mesh, jax.random.uniform(drawn[1], (_ROWS,)), BATCH)
        frequencies = jnp.exp(-jnp.arange(_WIDTH // 2) / 8.0)
        angles = time[:, None] * frequencies
        given = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1) @ params["time"]
        mixed = (1.0 - time[:, None, None]) * latents + time[:, None, None] * noise

        def run(x: jax.Array, block: Any) -> tuple[jax.Array, None]:
            shift = jnp.einsum("bw,wsv->sbv", jax.nn.silu(given), block["modulate"])[:, :, None]
            inner = normed(x) * (1.0 + shift[0]) + shift[1]
            x = x + shift[2] * attended(mesh, inner, block)
            inner = normed(x) * (1.0 + shift[3]) + shift[4]
            return x + shift[5] * fed_forward(mesh, inner, block), None

        x, _ = jax.lax.scan(run, mixed @ params["in"], params["blocks"])
        return jnp.mean(jnp.square(normed(x) @ params["out"] - (noise - latents)))

    return trained(loss, params, batch)
