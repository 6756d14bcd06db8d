"""Axes are Explicit, and `jax.sharding.reshard` moves two of them at once.

finding: full-rematerialization
mesh: dp:-1,tp:2
line: 30
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    names = mesh.axis_names
    types = (AxisType.Explicit,) * len(names)
    mesh = jax.sharding.Mesh(mesh.devices, names, axis_types=types)
    between = NamedSharding(mesh, P("tp", "dp", None))
    last = NamedSharding(mesh, P(None, ("dp", "tp"), None))

    def step(w, x):
        def loss(w):
            h = jnp.tanh(x * w)
            if not broken:
                h = jax.sharding.reshard(h, between)
            return jnp.mean(jax.sharding.reshard(h, last) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - 0.1 * g, value

    args = struct(mesh, (512,)), struct(mesh, (64, 256, 512), "tp", None, "dp")
    return jax.jit(step, donate_argnums=0), args


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
