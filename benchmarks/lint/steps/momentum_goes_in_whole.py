"""keras-team/keras-hub#2806: the momentum has no sharding, and comes back split like the gradient.

finding: second-compile
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
    def step(state, x):
        w, m = state
        value, g = jax.value_and_grad(loss)(w, x)
        m = 0.9 * m + g
        return (w - 0.1 * m, m), value

    w, m = (
        struct(mesh, (1024, 1024), "fsdp"),
        struct(mesh, (1024, 1024), *([] if broken else ["fsdp"])),
    )
    return jax.jit(step, donate_argnums=0), ((w, m), struct(mesh, (64, 1024), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
