"""jax-ml/jax#9237: the new weights are bfloat16, the old ones float32.

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
    def step(w, x):
        value, g = jax.value_and_grad(loss)(w, x)
        new = w - 0.1 * g
        return (new.astype(jnp.bfloat16) if broken else new), value

    w = struct(mesh, (2048, 2048), "fsdp")
    return jax.jit(step, donate_argnums=0), (w, struct(mesh, (64, 2048), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
