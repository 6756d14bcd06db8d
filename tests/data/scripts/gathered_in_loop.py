"""Applies one large weight again and again: split over fsdp, it is gathered in every turn."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

TURNS, ROWS, WIDTH = 64, 2048, 4096


def build(mesh, hoisted=False):
    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    def loss_of(weight, x):
        if hoisted:
            weight = jax.lax.with_sharding_constraint(weight, place(None, None))  # BEFORE

        def turn(x, _):
            return jnp.tanh(x @ weight), None  # IN THE LOOP

        x, _ = jax.lax.scan(turn, x, length=TURNS)  # THE LOOP
        return jnp.mean(x**2)

    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16, sharding=place("fsdp", None))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=place("fsdp", None))
    return loss_of, (weight, x)
