"""google/tunix 408ca1d9: the accumulator is made by `jnp.zeros`.

finding: state-on-one-device
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
    def step(total, w, x):
        total = total + jax.grad(loss)(w, x)
        return jax.lax.with_sharding_constraint(total, NamedSharding(mesh, P("fsdp")))

    rows = NamedSharding(mesh, P("fsdp"))
    total = jnp.zeros((2048, 512)) if broken else jnp.zeros((2048, 512), device=rows)
    args = struct(mesh, (2048, 512), "fsdp"), struct(mesh, (64, 2048), "fsdp")
    return jax.jit(step, donate_argnums=0), (total, *args)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
