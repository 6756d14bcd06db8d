"""fsdp cuts the columns of a weight into parts of 32, of which a TPU keeps 128 in a row.

finding: parts-below-tile
mesh: fsdp:-1
line: 20
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
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, value

    split = (None, "fsdp") if broken else ("fsdp", None)
    w, x = struct(mesh, (8192, 256), *split), struct(mesh, (512, 8192), "fsdp")
    return jax.jit(step, donate_argnums=0), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
