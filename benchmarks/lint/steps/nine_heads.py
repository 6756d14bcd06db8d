"""Nine heads, which a tensor axis of four or eight does not divide.

finding: padding-waste
mesh: dp:2,tp:-1
line: 25
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    heads = 9 if broken else 16
    by_heads = NamedSharding(mesh, P("dp", None, "tp"))

    def step(w, x):
        def loss(w):
            q = jnp.einsum("btd,dhk->bthk", x, w)
            q = jax.lax.with_sharding_constraint(q, by_heads)
            return jnp.mean(jnp.einsum("bthk,bshk->bhts", q, q) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return w - 0.1 * g, value

    w = struct(mesh, (256, heads, 64))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(w.sharding, None))
    return jitted, (w, struct(mesh, (16, 256, 256), "dp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
