"""Mixtures of experts: ragged products, one-hot products, experts under vmap, top-k routing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.support.scripts.steps.training import BATCH, abstract, split, trained

_EXPERTS, _WIDTH, _HIDDEN = 8, 512, 1024


def build(mesh: Mesh, step: str = "ragged") -> Any:
    """The step of that name and its arguments on `mesh`."""
    return {"ragged": _ragged, "one_hot": _one_hot, "mapped": _mapped}[step](mesh)


def _params(mesh: Mesh) -> Any:
    return {
        "router": abstract(mesh, (_WIDTH, _EXPERTS)),
        "up": abstract(mesh, (_EXPERTS, _WIDTH, _HIDDEN), "ep", "fsdp"),
        "down": abstract(mesh, (_EXPERTS, _HIDDEN, _WIDTH), "ep", None, "fsdp"),
    }


def _ragged(mesh: Mesh) -> Any:
    """Tokens sorted by expert (argsort), multiplied by `ragged_dot`."""
    x = abstract(mesh, (8192, _WIDTH), ("dp", "fsdp", "ep"))

    def loss(p: Any, x: jax.Array) -> jax.Array:
        logits = x @ p["router"]
        chosen = jnp.argmax(logits, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=_EXPERTS)
        hidden = jnp.tanh(jax.lax.ragged_dot(x[order], p["up"], sizes))
        out = jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)]
        return jnp.mean((out * jax.nn.softmax(logits).max(-1, keepdims=True)) ** 2)

    return trained(loss, _params(mesh), x)


def _one_hot(mesh: Mesh) -> Any:
    """Dispatch and combine as products with one-hot arrays (GShard), two experts a token."""
    groups, tokens, slots = 32, 256, 80
    x = abstract(mesh, (groups, tokens, _WIDTH), BATCH)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(jnp.einsum("gtd,de->gte", x, p["router"]))
        weight, chosen = jax.lax.top_k(gates, 2)
        hot = jax.nn.one_hot(chosen, _EXPERTS)
        place = jnp.cumsum(hot.reshape(groups, -1, _EXPERTS), 1).reshape(hot.shape) * hot - 1
        slot = jax.nn.one_hot(place.astype(jnp.int32), slots) * hot[..., None]
        combine = jnp.einsum("gtk,gtkes->gtes", weight, slot)
        given = jnp.einsum("gtes,gtd->gesd", (combine > 0).astype(x.dtype), x)
        given = split(mesh, given, BATCH, "ep")
        hidden = jax.nn.silu(jnp.einsum("gesd,edh->gesh", given, p["up"]))
        out = split(mesh, jnp.einsum("gesh,ehd->gesd", hidden, p["down"]), BATCH, "ep")
        return jnp.mean((x - jnp.einsum("gtes,gesd->gtd", combine, out)) ** 2)

    return trained(loss, _params(mesh), x)


def _mapped(mesh: Mesh) -> Any:
    """Every expert sees every token under vmap, and the gates weigh their sum."""
    x = abstract(mesh, (4096, _WIDTH), BATCH)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ p["router"])

        def expert(up: jax.Array, down: jax.Array, gate: jax.Array) -> jax.Array:
            return gate[:, None] * (jax.nn.gelu(x @ up) @ down)

        return jnp.mean((jax.vmap(expert)(p["up"], p["down"], gates.T).sum(0) - x) ** 2)

    return trained(loss, _params(mesh), x)
