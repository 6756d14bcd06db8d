"""Attention scores of a bfloat16 model, computed from operands that were converted to float32.

finding: wide-product
mesh: dp:-1
line: 24
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def step(w, x):
        def loss(w):
            q = x @ w
            if broken:
                wide = q.astype(jnp.float32)
                scores = jnp.einsum("btd,bsd->bts", wide, wide)
            else:
                scores = jnp.einsum("btd,bsd->bts", q, q)
            part = jax.nn.softmax(scores, axis=-1).astype(jnp.bfloat16)
            return jnp.mean(jnp.einsum("bts,bsd->btd", part, q) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w = struct(mesh, (512, 512), dtype=jnp.bfloat16)
    x = struct(mesh, (64, 256, 512), "dp", dtype=jnp.bfloat16)
    return jax.jit(step, donate_argnums=0), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
