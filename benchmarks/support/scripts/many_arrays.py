"""A step of 7,201 arrays: 600 layers, each traced by itself, with 12 arrays each, and a batch.

The layers are a Python loop and not a scan, as in many models that were ported from other
frameworks. `--layers N` makes it smaller.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, HIDDEN, ROWS = 512, 2048, 256
# Name, shape, and the axes that split it.
ARRAYS = (
    *((f"{name}_scale", (WIDTH,), (None,)) for name in ("attention", "mlp")),
    *((f"{name}_shift", (WIDTH,), (None,)) for name in ("attention", "mlp")),
    *((name, (WIDTH, WIDTH), ("fsdp", "tp")) for name in ("query", "key", "value")),
    ("out", (WIDTH, WIDTH), ("tp", "fsdp")),
    ("up", (WIDTH, HIDDEN), ("fsdp", "tp")),
    ("up_shift", (HIDDEN,), ("tp",)),
    ("down", (HIDDEN, WIDTH), ("tp", "fsdp")),
    ("down_shift", (WIDTH,), (None,)),
)


def layers() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=600)
    return parser.parse_args().layers


LAYERS = layers()


Weights = dict[str, Any]


def normalized(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return (
        centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale + shift
    )


def layer(w: Weights, x: jax.Array) -> jax.Array:
    h = normalized(x, w["attention_scale"], w["attention_shift"])
    mixed = jax.nn.sigmoid(h @ w["query"]) * jnp.tanh(h @ w["key"]) + h @ w["value"]
    x = x + mixed @ w["out"]
    h = normalized(x, w["mlp_scale"], w["mlp_shift"])
    return x + jax.nn.gelu(h @ w["up"] + w["up_shift"]) @ w["down"] + w["down_shift"]


def build(mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    def struct(shape: tuple[int, ...], axes: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    def loss(weights: list[Weights], x: jax.Array) -> jax.Array:
        y = x
        for w in weights:
            y = layer(w, y)
        return jnp.mean((y - x) ** 2)

    def step(weights: list[Weights], x: jax.Array) -> tuple[list[Weights], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value

    weights = [{name: struct(shape, axes) for name, shape, axes in ARRAYS} for _ in range(LAYERS)]
    return jax.jit(step, donate_argnums=0), (weights, struct((ROWS, WIDTH), (("dp", "fsdp"),)))
