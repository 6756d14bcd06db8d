"""openxla/xla#44794: a stack of layers is split over its layers, and scanned.

finding: layer-split-stack
mesh: fsdp:-1
line: 22
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    spec = ("fsdp",) if broken else (None, "fsdp")

    def loss(w, x):
        y, _ = jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)
        return jnp.mean(y**2)

    def step(w, x):
        value, g = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * g, value

    w = struct(mesh, (16, 512, 512), *spec)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(w.sharding, None))
    return jitted, (w, struct(mesh, (64, 512), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
