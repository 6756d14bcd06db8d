"""keras-team/keras-hub#2806: a rule of the layout matches nothing any more.

finding: replicated-state
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
    rules = {"embed": ("fsdp",), "mlp_up": ("fsdp",), "mlp_down": ("fsdp",)}
    name = "down" if broken else "mlp_down"

    def loss(p, x):
        return jnp.mean((jax.nn.gelu(x @ p["embed"] @ p["mlp_up"]) @ p[name]) ** 2)

    def step(p, x):
        value, g = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value

    shapes = {"embed": (1024, 1024), "mlp_up": (1024, 4096), name: (4096, 512)}
    p = {one: struct(mesh, shape, *rules.get(one, ())) for one, shape in shapes.items()}
    kept = jax.tree.map(lambda one: one.sharding, p)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted, (p, struct(mesh, (64, 1024), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
