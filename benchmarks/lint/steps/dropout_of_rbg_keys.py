"""Dropout with keys of XLA's own generator, whose bits no device makes in part.

finding: whole-random-bits
mesh: dp:-1
line: 23
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    kind = "rbg" if broken else "threefry2x32"

    def step(w, seed, x):
        key = jax.random.key(seed, impl=kind)
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(((x * kept) @ w) ** 2))(w)
        return w - 0.1 * gradient, value

    w, x = struct(mesh, (1024, 256)), struct(mesh, (4096, 1024), "dp")
    return jax.jit(step, donate_argnums=0), (w, struct(mesh, (), dtype=jnp.int32), x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
