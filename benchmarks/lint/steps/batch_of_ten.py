"""jax-ml/jax#27808: a batch that the devices do not divide.

finding: padding-waste
mesh: dp:-1
line: 23
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    shape = (20, 256, 512) if broken else (32, 256, 512)

    def step(x, w):
        y = jnp.tanh(x * w)
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("dp")))
        return jnp.mean(jnp.sin(y) ** 2)

    return jax.jit(step), (struct(mesh, shape), struct(mesh, (shape[-1],)))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
