"""jax-ml/jax#35650: a sort along the dimension that the mesh splits.

finding: undivided-operation
mesh: dp:-1
line: 22
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def step(w, x):
        y = jnp.tanh(x @ w)
        if broken:
            return jnp.mean(jax.lax.sort(y, dimension=0) ** 2)
        return jnp.mean(jax.lax.sort(y, dimension=1) ** 2)

    return jax.jit(step), (struct(mesh, (64, 256)), struct(mesh, (64, 256, 64), "dp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
