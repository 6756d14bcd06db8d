"""Physical-Intelligence/openpi#112: parameters are loaded on the first device.

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
    def step(w, x):
        value, g = jax.value_and_grad(loss)(w, x)
        kept = NamedSharding(mesh, P("fsdp"))
        return jax.lax.with_sharding_constraint(w - 0.1 * g, kept), value

    w = jnp.zeros((1024, 1024))
    w = w if broken else jax.device_put(w, NamedSharding(mesh, P("fsdp")))
    return jax.jit(step, donate_argnums=0), (w, struct(mesh, (64, 1024), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
