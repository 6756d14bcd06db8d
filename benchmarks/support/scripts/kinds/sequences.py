"""Sequences: causal attention, chunked losses, decoding, recurrences, scans."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import automesh
from benchmarks.support.scripts.steps.training import BATCH, abstract, split, trained


def build(mesh: Mesh, step: str = "causal") -> Any:
    """The step of that name and its arguments on `mesh`."""
    return {
        "causal": _causal,
        "chunked_loss": _chunked_loss,
        "decode": _decode,
        "lstm": _lstm,
        "linear_recurrence": _linear_recurrence,
        "beam": _beam,
    }[step](mesh)


def _causal(mesh: Mesh) -> Any:
    """Causal attention of a long context in blocks of queries (a scan), bfloat16."""
    heads, size, width, length = 8, 64, 512, 2048
    params = {
        "qkv": abstract(mesh, (width, 3, heads, size), "fsdp", None, "tp"),
        "out": abstract(mesh, (heads, size, width), "tp", None, "fsdp"),
    }
    x = abstract(mesh, (8, length, width), BATCH, dtype=jnp.bfloat16)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        qkv = jnp.einsum("btd,dchs->cbths", x, p["qkv"].astype(x.dtype))
        q, k, v = (split(mesh, one, BATCH, None, "tp") for one in qkv)
        blocks = jnp.moveaxis(q.reshape(8, -1, 256, heads, size), 1, 0)

        @jax.checkpoint
        def block(_: None, one: Any) -> Any:
            number, q = one
            scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / 8.0
            places = number * 256 + jnp.arange(256)
            scores = jnp.where(places[:, None] >= jnp.arange(length)[None], scores, -1e9)
            kept = jax.nn.softmax(scores).astype(q.dtype)
            return None, jnp.einsum("bhts,bshd->bthd", kept, v)

        _, found = jax.lax.scan(block, None, (jnp.arange(length // 256), blocks))
        y = jnp.moveaxis(found, 0, 1).reshape(8, length, heads, size)
        y = jnp.einsum("bthd,hdw->btw", y, p["out"].astype(x.dtype))
        return jnp.mean((x + y).astype(jnp.float32) ** 2)

    return trained(loss, params, x)


def _chunked_loss(mesh: Mesh) -> Any:
    """A large vocabulary whose logits are made in pieces of the sequence."""
    words, width, length, pieces = 32_768, 512, 512, 8
    params = {
        "embed": abstract(mesh, (words, width), "tp", "fsdp"),
        "hidden": abstract(mesh, (width, width), "fsdp", "tp"),
    }
    tokens = abstract(mesh, (16, length), BATCH, dtype=jnp.int32)

    def loss(p: Any, tokens: jax.Array) -> jax.Array:
        x = split(mesh, p["embed"][tokens], BATCH)
        x = jax.nn.gelu(x @ p["hidden"])
        cut = jnp.moveaxis(x.reshape(16, pieces, -1, width), 1, 0)
        wanted = jnp.moveaxis(tokens.reshape(16, pieces, -1), 1, 0)

        @jax.checkpoint
        def piece(total: jax.Array, one: Any) -> Any:
            x, wanted = one
            scores = jax.nn.log_softmax(split(mesh, x @ p["embed"].T, BATCH, None, "tp"))
            found = jnp.take_along_axis(scores, wanted[..., None], axis=-1)
            return total - jnp.sum(found), None

        return jax.lax.scan(piece, jnp.float32(0), (cut, wanted))[0] / (16 * length)

    return trained(loss, params, tokens)


def _decode(mesh: Mesh) -> Any:
    """Sixteen tokens of decoding with a cache that is written at a place in the data."""
    layers, heads, size, width, length = 4, 8, 64, 512, 1024
    params = {
        "qkv": abstract(mesh, (layers, width, 3, heads, size), None, None, None, "tp"),
        "out": abstract(mesh, (layers, heads, size, width), None, "tp"),
    }
    cache = abstract(mesh, (layers, 2, 32, length, heads, size), None, None, BATCH, None, "tp")
    x, at = abstract(mesh, (32, width), BATCH), abstract(mesh, (), dtype=jnp.int32)

    def step(params: Any, cache: jax.Array, x: jax.Array, at: jax.Array) -> Any:
        def token(state: Any, _: None) -> Any:
            cache, x, at = state

            def layer(x: jax.Array, one: Any) -> Any:
                p, cache = one
                q, k, v = jnp.einsum("bd,dchs->cbhs", x, p["qkv"])
                new = jnp.stack([k, v])[:, :, None]
                cache = jax.lax.dynamic_update_slice(cache, new, (0, 0, at, 0, 0))
                scores = jnp.einsum("bhs,bths->bht", q, cache[0])
                scores = jnp.where(jnp.arange(length) <= at, scores, -1e9)
                y = jnp.einsum("bht,bths->bhs", jax.nn.softmax(scores), cache[1])
                return x + jnp.einsum("bhs,hsd->bd", y, p["out"]), cache

            x, cache = jax.lax.scan(layer, x, (params, cache))
            return (cache, x, at + 1), None

        return jax.lax.scan(token, (cache, x, at), length=16)[0]

    return automesh.Workload(step, (params, cache, x, at), donate_argnums=(1,))


def _lstm(mesh: Mesh) -> Any:
    """An LSTM in bfloat16 with float32 state, rematerialized step by step."""
    hidden = 512
    params = {
        "x": abstract(mesh, (hidden, 4 * hidden), "fsdp", "tp"),
        "h": abstract(mesh, (hidden, 4 * hidden), "fsdp", "tp"),
    }
    x = abstract(mesh, (64, 128, hidden), BATCH, dtype=jnp.bfloat16)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def cell(state: Any, x: jax.Array) -> Any:
            h, c = state
            gates = x @ p["x"].astype(x.dtype) + h.astype(x.dtype) @ p["h"].astype(x.dtype)
            i, f, g, o = jnp.split(gates.astype(jnp.float32), 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = split(mesh, jnp.zeros((64, hidden)), BATCH)
        (h, _), _ = jax.lax.scan(cell, (zeros, zeros), jnp.swapaxes(x, 0, 1))
        return jnp.mean(h**2)

    return trained(loss, params, x)


def _linear_recurrence(mesh: Mesh) -> Any:
    """A gated linear recurrence by `associative_scan` along a sequence that is split over tp."""
    width = 512
    params = {
        "in": abstract(mesh, (width, 2 * width), "fsdp"),
        "out": abstract(mesh, (width, width), None, "fsdp"),
    }
    x = abstract(mesh, (16, 1024, width), BATCH, "tp")

    def joined(one: Any, other: Any) -> Any:
        return one[0] * other[0], other[0] * one[1] + other[1]

    def loss(p: Any, x: jax.Array) -> jax.Array:
        value, gate = jnp.split(x @ p["in"], 2, axis=-1)
        gate = jax.nn.sigmoid(gate)
        _, y = jax.lax.associative_scan(joined, (gate, (1 - gate) * value), axis=1)
        return jnp.mean((split(mesh, y @ p["out"], BATCH, "tp") - x) ** 2)

    return trained(loss, params, x)


def _beam(mesh: Mesh) -> Any:
    """The best words of a large vocabulary: sorted, cut at a mass, sampled."""
    x = abstract(mesh, (256, 1024), BATCH)
    words = abstract(mesh, (1024, 32_768), "fsdp", "tp")

    def step(words: jax.Array, x: jax.Array) -> Any:
        scores = jax.nn.log_softmax(x @ words)
        order = jnp.argsort(-scores, axis=-1)
        ranked = jnp.take_along_axis(scores, order, axis=-1)
        kept = jnp.where(jnp.cumsum(jnp.exp(ranked), -1) < 0.9, ranked, -1e9)
        best, place = jax.lax.top_k(kept, 8)
        return best, jnp.take_along_axis(order, place, axis=-1)

    return automesh.Workload(step, (words, x))
