"""A constraint on the new parameters splits the other dimension.

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
    kept = P(None, "fsdp") if broken else P("fsdp")

    def step(w, x):
        value, g = jax.value_and_grad(loss)(w, x)
        return jax.lax.with_sharding_constraint(w - 0.1 * g, NamedSharding(mesh, kept)), value

    w = struct(mesh, (1024, 2048), "fsdp")
    return jax.jit(step, donate_argnums=0), (w, struct(mesh, (64, 1024), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
