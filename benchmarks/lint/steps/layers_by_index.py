"""A loop takes layer `i` of a stack that is split over its layers.

finding: layer-split-stack
mesh: fsdp:-1
line: 23
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    spec = ("fsdp",) if broken else (None, None, "fsdp")

    def step(w, x):
        def layer(i, h):
            return jnp.tanh(h @ jax.lax.dynamic_index_in_dim(w, i, keepdims=False))

        return jax.lax.fori_loop(0, 32, layer, x)

    return jax.jit(step), (struct(mesh, (32, 256, 256), *spec), struct(mesh, (64, 256), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
