"""jax-ml/jax#9675: a training step without `donate_argnums`.

finding: undonated-state
mesh: fsdp:-1
line: 23
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def make(mesh, broken):
    def step(w, m, x):
        value, g = jax.value_and_grad(loss)(w, x)
        m = 0.9 * m + g
        return w - 0.1 * m, m, value

    w = struct(mesh, (4096, 1024), "fsdp")
    donated = () if broken else (0, 1)
    return jax.jit(step, donate_argnums=donated), (w, w, struct(mesh, (64, 4096), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
