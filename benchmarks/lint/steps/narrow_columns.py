"""tp cuts the columns of a weight into parts of 32, where a TPU multiplies 128 at a time.

finding: parts-below-tile
mesh: tp:-1
line: 22
only: tpu
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def step(w, x):
        def loss(w):
            return jnp.mean((x @ w) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    width = 256 if broken else 2048
    w, x = struct(mesh, (4096, width), None, "tp"), struct(mesh, (4096, 4096))
    return jax.jit(step, donate_argnums=0), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
