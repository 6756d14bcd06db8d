"""A small decoder that stays as it is: releases of jax wrote the figures of the rules beside it.

    automesh check tests/data/check/decoder.py --rules tests/data/check/jax_0.10.2.toml --update

on a copy of one of the files, with that release installed, makes those of another release.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS, ROWS, LENGTH, MODEL, HEADS, HIDDEN, VOCAB = 4, 32, 128, 256, 8, 1024, 2048


def build(mesh, remat=True):
    def pin(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def normed(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5)

    def layer(x, weights):
        queries, keys, values = jnp.einsum("bsd,cdhk->cbshk", normed(x), weights["qkv"])
        scores = jnp.einsum("bqhk,bshk->bhqs", queries, keys) / (MODEL // HEADS) ** 0.5
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        mixed = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        x = x + jnp.einsum("bhqs,bshk,hkd->bqd", mixed, values, weights["out"])
        hidden = pin(jax.nn.silu(normed(x) @ weights["up"]), ("dp", "fsdp"), None, "tp")
        return pin(x + hidden @ weights["down"], ("dp", "fsdp"), None, None), None

    def loss(weights, tokens):
        x = weights["embedding"][tokens[:, :-1]]
        body = jax.checkpoint(layer) if remat else layer
        x, _ = jax.lax.scan(body, x, weights["layers"])
        logits = normed(x) @ weights["embedding"].T
        said = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -jnp.mean(said)

    def step(state, tokens):
        value, gradients = jax.value_and_grad(loss)(state["weights"], tokens)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], gradients)
        weights = jax.tree.map(lambda w, m: w - 1e-3 * m, state["weights"], moments)
        return {"weights": weights, "moments": moments}, value

    def struct(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    head = MODEL // HEADS
    shapes = {
        "embedding": ((VOCAB, MODEL), ("tp", "fsdp")),
        "layers": {
            "qkv": ((LAYERS, 3, MODEL, HEADS, head), (None, None, "fsdp", "tp", None)),
            "out": ((LAYERS, HEADS, head, MODEL), (None, "tp", None, "fsdp")),
            "up": ((LAYERS, MODEL, HIDDEN), (None, "fsdp", "tp")),
            "down": ((LAYERS, HIDDEN, MODEL), (None, "tp", "fsdp")),
        },
    }
    weights = jax.tree.map(
        lambda one: struct(one[0], jnp.float32, *one[1]),
        shapes,
        is_leaf=lambda one: isinstance(one, tuple),
    )
    tokens = struct((ROWS, LENGTH + 1), jnp.int32, ("dp", "fsdp"), None)
    step = jax.jit(step, donate_argnums=0)
    return step, ({"weights": weights, "moments": weights}, tokens)
