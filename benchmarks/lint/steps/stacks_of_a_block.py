"""All stacks of a block are split over their layers, and one rematerialized scan reads them.

finding: layer-split-stack
mesh: fsdp:-1
line: 30
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    spec = ("fsdp",) if broken else (None, "fsdp")
    layers = {
        "up": struct(mesh, (16, 256, 1024), *spec),
        "down": struct(mesh, (16, 1024, 256), *spec),
    }

    @jax.checkpoint
    def block(h, layer):
        return h + jax.nn.silu(h @ layer["up"]) @ layer["down"], None

    def loss(layers, x):
        h, _ = jax.lax.scan(block, x, layers)
        return jnp.mean(h**2)

    def step(layers, x):
        value, g = jax.value_and_grad(loss)(layers, x)
        return jax.tree.map(lambda w, one: w - 0.1 * one, layers, g), value

    kept = jax.tree.map(lambda one: one.sharding, layers)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted, (layers, struct(mesh, (64, 256), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
