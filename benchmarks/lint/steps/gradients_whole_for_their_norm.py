"""Gradients are constrained to be whole, so that their norm is easily computed.

finding: replicated-gradient
mesh: fsdp:-1
line: 32
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    params = {"up": struct(mesh, (1024, 2048), "fsdp"), "down": struct(mesh, (2048, 1024), "fsdp")}
    split = {name: one.sharding for name, one in params.items()}
    wanted = dict.fromkeys(params, NamedSharding(mesh, P())) if broken else split

    def loss(p, x):
        return jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"] - x) ** 2)

    def step(p, x):
        value, g = jax.value_and_grad(loss)(p, x)

        def keep(gradient, sharding):
            return jax.lax.with_sharding_constraint(gradient, sharding)

        g = jax.tree.map(keep, g, wanted)
        norm = jnp.sqrt(sum(jnp.sum(one**2) for one in jax.tree.leaves(g)))
        return jax.tree.map(lambda w, one: w - 0.1 * one / norm, p, g), value

    jitted = jax.jit(step, donate_argnums=0, out_shardings=(split, None))
    return jitted, (params, struct(mesh, (256, 1024), "fsdp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
