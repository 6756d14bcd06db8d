"""marin-community/marin#7279: a stack of experts is spread over all devices.

finding: full-rematerialization
mesh: data:-1,expert:2
line: 28
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

    def step(m):
        y = m.reshape(8, 4 * 256, 256)
        y = to(y, "data", None, "expert")
        if not broken:
            y = to(y, "data", "expert", None)
        spread = NamedSharding(mesh, P(None, ("data", "expert")))
        y = jax.lax.with_sharding_constraint(y, spread)
        return jnp.mean(jnp.tanh(y))

    return jax.jit(step), (struct(mesh, (8 * 2, 4 * 128, 256), "data", None, "expert"),)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
