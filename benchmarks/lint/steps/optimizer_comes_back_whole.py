"""google/flax#5172: the optimizer's state comes back whole.

finding: second-compile
mesh: fsdp:-1
line: 25
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
    whole = NamedSharding(mesh, P() if broken else P("fsdp"))

    def step(w, v, x):
        value, g = jax.value_and_grad(loss)(w, x)
        v = jax.lax.with_sharding_constraint(0.99 * v + g * g, whole)
        return w - 0.1 * g / (jnp.sqrt(v) + 1e-6), v, value

    w = struct(mesh, (1024, 1024), "fsdp")
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(w.sharding, None, None))
    return jitted, (w, w, struct(mesh, (64, 1024), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
