"""fsdp splits the parameters, and nothing splits the batch.

finding: undivided-operation
mesh: fsdp:-1
line: 20
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def step(w, x):
        value, g = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * g, value

    w = struct(mesh, (1024, 1024), "fsdp")
    x = struct(mesh, (64, 256, 1024), *([] if broken else ["fsdp"]))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(w.sharding, None))
    return jitted, (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
