"""Gate and up are packed side by side into the columns that tp splits.

finding: slice-across-parts
mesh: tp:-1
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
        def loss(w):
            if broken:
                gate, up = jnp.split(x @ w, 2, axis=1)
            else:
                both = jnp.einsum("bd,dgf->bgf", x, w)
                gate, up = both[:, 0], both[:, 1]
            return jnp.mean((jax.nn.silu(gate) * up) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w = struct(mesh, (512, 8192), None, "tp")
    if not broken:
        w = struct(mesh, (512, 2, 4096), None, None, "tp")
    return jax.jit(step, donate_argnums=0), (w, struct(mesh, (2048, 512)))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
