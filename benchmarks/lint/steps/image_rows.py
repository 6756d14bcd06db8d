"""A grid that is split by rows and columns, then by two other dimensions at once.

finding: full-rematerialization
mesh: x:-1,y:2
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

    def step(grid):
        rows = to(jnp.sin(grid), "y", None, "x")
        if not broken:
            rows = to(rows, "y", "x", None)
        spread = NamedSharding(mesh, P(None, ("x", "y")))
        rows = jax.lax.with_sharding_constraint(rows, spread)
        return jnp.mean(rows**2)

    return jax.jit(step), (struct(mesh, (32, 128, 1024), "y", None, "x"),)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
