"""Causal attention with grouped queries, as an online softmax over chunks of keys.

Letters of shapes: b rows, s queries, t keys, k key heads, g queries per key head, h head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.layout import Layout

# The score of a key that a query may not see: finite, so that a chunk of such keys adds zeros.
HIDDEN = -1e30


def rotated(heads: jax.Array, positions: jax.Array, *, base: float = 500_000.0) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of [b, s, ..., h] at positions [s]."""
    half = heads.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    angles = angles.reshape(len(positions), *[1] * (heads.ndim - 3), half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(heads.dtype)


def gathered_attention(
    queries: jax.Array, keys_values: jax.Array, *, layout: Layout, chunk: int
) -> jax.Array:
    """Each device's queries [b, s, k, g, h] against all keys of their rows, gathered over `sp`."""
    keys_values = layout.pin(keys_values, None, layout.rows, None, "tp", None)
    seen = nothing_seen(queries)
    seen = attend(seen, queries, keys_values, first_query=0, first_key=0, chunk=chunk)
    return finished(seen, queries.dtype)


class Partial(NamedTuple):
    """A softmax over the keys seen so far, float32.

    `values` [b, s, k, g, h]: sum of weighted values; `weights` [b, s, k, g]: sum of the weights;
    `top` [b, s, k, g]: the highest score, by which the exponentials are scaled down.
    """

    values: jax.Array
    weights: jax.Array
    top: jax.Array


def nothing_seen(queries: jax.Array) -> Partial:
    """The softmax over no keys at all."""
    return Partial(
        values=jnp.zeros(queries.shape, jnp.float32),
        weights=jnp.zeros(queries.shape[:-1], jnp.float32),
        top=jnp.full(queries.shape[:-1], HIDDEN, jnp.float32),
    )


def finished(seen: Partial, dtype: Any) -> jax.Array:
    """The attention's output once all keys were seen."""
    return (seen.values / seen.weights[..., None]).astype(dtype)


def attend(
    seen: Partial,
    queries: jax.Array,
    keys_values: jax.Array,
    *,
    first_query: jax.Array | int,
    first_key: jax.Array | int,
    chunk: int,
) -> Partial:
    """Adds keys and values to what the queries have seen, `chunk` keys at a time.

    Args:
      seen: the keys before; the very first key shown to a query must be one that it may see.
      queries: [b, s, k, g, h].
      keys_values: [2, b, t, k, h].
      first_query: position of the first query in the row.
      first_key: position of the first key in the row.
      chunk: divides t.
    """

    def look(seen: Partial, keys_values: jax.Array, first_key: Any) -> Partial:
        keys, values = keys_values
        scores = _scores(queries, keys, first_query, first_key)
        top = jax.lax.stop_gradient(jnp.maximum(seen.top, scores.max(axis=-1)))
        weights = jnp.exp(scores - top[..., None])
        fade = jnp.exp(seen.top - top)
        added = _wide("bskgt,btkh->bskgh", weights.astype(values.dtype), values)
        return Partial(
            values=seen.values * fade[..., None] + added,
            weights=seen.weights * fade + weights.sum(axis=-1),
            top=top,
        )

    if keys_values.shape[2] == chunk:
        return look(seen, keys_values, first_key)

    @jax.checkpoint
    def next_chunk(seen: Partial, xs: tuple[jax.Array, jax.Array]) -> tuple[Partial, None]:
        return look(seen, xs[1], first_key + xs[0]), None

    return jax.lax.scan(next_chunk, seen, _chunks(keys_values, chunk))[0]


def attend_backward(
    queries: jax.Array,
    keys_values: jax.Array,
    d_output: jax.Array,
    output_slope: jax.Array,
    log_weights: jax.Array,
    *,
    first_query: jax.Array | int,
    first_key: jax.Array | int,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """What some keys add to the gradients of queries, and the gradients of these keys and values.

    The softmax is made again from its normalization (arXiv:2205.14135, algorithm 4).

    Args:
      queries: [b, s, k, g, h].
      keys_values: [2, b, t, k, h].
      d_output: gradient of the finished output, [b, s, k, g, h].
      output_slope: sum over h of the output times its gradient, float32 [b, s, k, g].
      log_weights: logarithm of the sum of the exponentials of all scores, float32 [b, s, k, g].
      first_query: position of the first query in the row.
      first_key: position of the first key in the row.
      chunk: divides t.
    """

    def look(keys_values: jax.Array, first_key: Any) -> tuple[jax.Array, jax.Array]:
        keys, values = keys_values
        scores = _scores(queries, keys, first_query, first_key)
        weights = jnp.exp(scores - log_weights[..., None])
        d_weights = _wide("bskgh,btkh->bskgt", d_output, values)
        d_scores = weights * (d_weights - output_slope[..., None]) * queries.shape[-1] ** -0.5
        d_scores, weights = d_scores.astype(keys.dtype), weights.astype(keys.dtype)
        d_queries = _wide("bskgt,btkh->bskgh", d_scores, keys)
        d_keys = _wide("bskgt,bskgh->btkh", d_scores, queries)
        d_values = _wide("bskgt,bskgh->btkh", weights, d_output)
        return d_queries, jnp.stack([d_keys, d_values])

    if keys_values.shape[2] == chunk:
        return look(keys_values, first_key)

    def next_chunk(
        total: jax.Array, xs: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        d_queries, d_keys_values = look(xs[1], first_key + xs[0])
        return total + d_queries, d_keys_values

    nothing = jnp.zeros_like(d_output * output_slope[..., None])
    d_queries, pieces = jax.lax.scan(next_chunk, nothing, _chunks(keys_values, chunk))
    return d_queries, jnp.moveaxis(pieces, 0, 2).reshape(keys_values.shape)


def _scores(queries: jax.Array, keys: jax.Array, first_query: Any, first_key: Any) -> jax.Array:
    scores = _wide("bskgh,btkh->bskgt", queries, keys) * queries.shape[-1] ** -0.5
    query_at = first_query + jnp.arange(queries.shape[1])
    key_at = first_key + jnp.arange(keys.shape[1])
    visible = key_at <= query_at[:, None]
    return jnp.where(visible[:, None, None, :], scores, HIDDEN)


def _wide(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _chunks(keys_values: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Where each chunk starts, and [chunks, 2, b, chunk, k, h]."""
    two, rows, length, heads, size = keys_values.shape
    split = keys_values.reshape(two, rows, length // chunk, chunk, heads, size)
    return jnp.arange(0, length, chunk), jnp.moveaxis(split, 2, 0)
