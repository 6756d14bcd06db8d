"""apple/axlearn#993, openxla/xla#19166: microbatches are cut from the front of the batch.

finding: microbatch-reshape
mesh: dp:-1
line: 26
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def make(mesh, broken):
    def microbatches(x, n):
        if not broken:
            return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(n, x.shape[0] // n, *x.shape[1:])

    def step(w, x):
        def body(total, part):
            return total + jax.grad(loss)(w, part), None

        g, _ = jax.lax.scan(body, jnp.zeros_like(w), microbatches(x, 4))
        return w - 0.1 * g

    w, x = struct(mesh, (256, 256)), struct(mesh, (64, 128, 256), "dp")
    return jax.jit(step, donate_argnums=0), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
