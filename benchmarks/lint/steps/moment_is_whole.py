"""google/flax#5105: the moment does not have the sharding of its parameter.

finding: replicated-state
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

    w = struct(mesh, (2048, 1024), "fsdp")
    state = (w, struct(mesh, (2048, 1024)) if broken else w)
    kept = jax.tree.map(lambda one: one.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted, (state, struct(mesh, (64, 2048), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
