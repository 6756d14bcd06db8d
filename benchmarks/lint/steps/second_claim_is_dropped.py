"""marin-community/marin#1903: the head's logical axis has no mesh axis left.

finding: replicated-state
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
    def spec(*names):
        rules, used, out = {"embed": "fsdp", "heads": None}, set(), []
        for name in names:
            axis = rules.get(name)
            out.append(None if axis in used else axis)
            used.add(axis)
        return out

    def loss(p, x):
        return jnp.mean((jnp.tanh(x @ p["in"]) @ p["heads"]) ** 2)

    def step(p, x):
        value, g = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value

    p = {"in": struct(mesh, (1024, 4096), *spec("embed", "mlp"))}
    p["heads"] = struct(mesh, (4096, 768), *spec("heads" if broken else "embed", "dim"))
    kept = jax.tree.map(lambda one: one.sharding, p)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted, (p, struct(mesh, (64, 1024), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
