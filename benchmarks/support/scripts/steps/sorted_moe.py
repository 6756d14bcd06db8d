"""A mixture of experts that sorts its tokens by expert (argsort, gather, ragged rows in slots).

Tokens are split over dp and fsdp, experts over ep, their hidden units over tp.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from training import BATCH, abstract, split, trained

_TOKENS, _WIDTH, _HIDDEN, _EXPERTS, _CHOSEN = 2048, 128, 512, 16, 2
_SLOTS = 2 * _TOKENS * _CHOSEN // _EXPERTS


def build(mesh: Mesh) -> Any:
    """The step and its arguments on `mesh`."""
    params = {
        "router": abstract(mesh, (_WIDTH, _EXPERTS), "fsdp", None),
        "up": abstract(mesh, (_EXPERTS, _WIDTH, _HIDDEN), "ep", "fsdp", "tp"),
        "down": abstract(mesh, (_EXPERTS, _HIDDEN, _WIDTH), "ep", "tp", "fsdp"),
    }
    batch = abstract(mesh, (_TOKENS, _WIDTH), BATCH, None)

    def loss(params: Any, batch: Any) -> jax.Array:
        weight, expert = jax.lax.top_k(jax.nn.softmax(batch @ params["router"]), _CHOSEN)
        chosen = expert.reshape(-1)
        order = jnp.argsort(chosen)
        of_expert = chosen[order]
        first = jnp.searchsorted(of_expert, jnp.arange(_EXPERTS))
        place = jnp.arange(_TOKENS * _CHOSEN) - first[of_expert]
        token = order // _CHOSEN
        slots = jnp.zeros((_EXPERTS, _SLOTS, _WIDTH))
        slots = slots.at[of_expert, place].set(batch[token], mode="drop")
        slots = split(mesh, slots, "ep", BATCH, None)
        hidden = jax.nn.silu(jnp.einsum("esw,ewh->esh", slots, params["up"]))
        out = split(mesh, jnp.einsum("esh,ehw->esw", hidden, params["down"]), "ep", BATCH, None)
        taken = out.at[of_expert, place].get(mode="fill", fill_value=0.0)
        scaled = taken * weight.reshape(-1)[order][:, None]
        summed = jnp.zeros((_TOKENS, _WIDTH)).at[token].add(scaled)
        return jnp.mean(jnp.square(split(mesh, summed, BATCH, None) - batch))

    return trained(loss, params, batch)
