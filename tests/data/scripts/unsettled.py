"""A step whose state comes back in other shards than it goes in."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SIZE = 256


def build(mesh):
    weights = jax.ShapeDtypeStruct(
        (SIZE, SIZE), jnp.float32, sharding=NamedSharding(mesh, P(None, None))
    )
    batch = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=NamedSharding(mesh, P("dp")))

    def step(weights, batch):
        moved = weights - jnp.mean(jnp.tanh(batch @ weights), axis=0)
        return jax.lax.with_sharding_constraint(moved, NamedSharding(mesh, P("dp"))), jnp.sum(moved)

    return step, (weights, batch)
