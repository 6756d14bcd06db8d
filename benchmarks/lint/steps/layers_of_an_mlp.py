"""Two stacks of an MLP, both split over their layers.

finding: layer-split-stack
mesh: fsdp:-1
line: 25
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    spec = ("fsdp",) if broken else (None, "fsdp")

    def block(h, layer):
        return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"], None

    def loss(p, x):
        return jnp.mean(jax.lax.scan(block, x, p)[0] ** 2)

    def step(p, x):
        value, g = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value

    p = {"up": struct(mesh, (16, 256, 1024), *spec), "down": struct(mesh, (16, 1024, 256), *spec)}
    kept = jax.tree.map(lambda one: one.sharding, p)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted, (p, struct(mesh, (64, 256), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
