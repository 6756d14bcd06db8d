"""Attention by heads, then by sequence, where the batch axis changes its place too.

finding: full-rematerialization
mesh: dp:-1,tp:2
line: 27
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def to(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(x, w):
        y = to(x * w, "dp", None, "tp", None)
        if not broken:
            y = to(y, None, "dp", "tp", None)
        spread = NamedSharding(mesh, P(None, ("dp", "tp")))
        y = jax.lax.with_sharding_constraint(y, spread)
        return jnp.mean(y**2)

    return jax.jit(step), (struct(mesh, (32, 256, 16, 64), "dp", None, "tp"), struct(mesh, (64,)))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
