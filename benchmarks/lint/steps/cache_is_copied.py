"""A decoding step keeps the old cache beside the new one.

finding: undonated-state
mesh: tp:-1
line: 19
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def step(cache, x, place):
        return jax.lax.dynamic_update_slice_in_dim(cache, x, place, 0), x.sum()

    cache = struct(mesh, (1024, 16, 512), None, None, "tp")
    x = struct(mesh, (1, 16, 512), None, None, "tp")
    donated = () if broken else 0
    return jax.jit(step, donate_argnums=donated), (cache, x, struct(mesh, (), dtype=jnp.int32))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
