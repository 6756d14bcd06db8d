"""A loop that runs until something has converged, and one with a fixed number of rounds."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def step(w, x):
    def body(carry):
        count, v = carry
        v = w @ v
        return count + 1, v / jnp.linalg.norm(v)

    count, v = jax.lax.while_loop(
        lambda carry: (carry[0] < 20) & (jnp.linalg.norm(carry[1]) > 1e-6),
        body,
        (0, jnp.mean(x, axis=0)),
    )
    w = jax.lax.fori_loop(0, 3, lambda _, w: w - 0.01 * jnp.outer(v, v) @ w, w)
    return w, {"loss": v @ w @ v, "rounds": count}


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return jax.jit(step, donate_argnums=0), (struct((32, 32), None, "tp"), struct((8, 32), "dp"))
