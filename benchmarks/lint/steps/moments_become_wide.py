"""A bfloat16 moment is promoted by a float32 gradient.

finding: state-changes-type
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
        m = m if broken else m.astype(jnp.bfloat16)
        return w - 0.1 * m, m, value

    w = struct(mesh, (2048, 1024), "fsdp")
    m = struct(mesh, (2048, 1024), "fsdp", dtype=jnp.bfloat16)
    return jax.jit(step, donate_argnums=(0, 1)), (w, m, struct(mesh, (64, 2048), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
