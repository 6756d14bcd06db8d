"""The examples are constrained after the reshape: the batch is sent around once.

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
        parts = microbatches(x, 4)
        rows = NamedSharding(mesh, P(None, "dp"))
        parts = jax.lax.with_sharding_constraint(parts, rows)

        def body(total, part):
            return total + loss(w, part), None

        return jax.lax.scan(body, 0.0, parts)[0]

    w, x = struct(mesh, (256, 256)), struct(mesh, (128, 64, 256), "dp")
    return jax.jit(step), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
