"""What a model gets beside tokens."""

import jax.numpy as jnp


def build_positions_from_mask(mask):
    return jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)


def make_causal_attn_mask(mask):
    length = mask.shape[-1]
    return mask[:, None, :] & jnp.tril(jnp.ones((length, length), bool))[None]
