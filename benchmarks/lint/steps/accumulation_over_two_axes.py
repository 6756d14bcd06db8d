"""Both axes of the batch are spent on its microbatches.

finding: microbatch-reshape
mesh: dp:2,fsdp:-1
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
            return total + loss(w, part), None

        return jax.lax.scan(body, 0.0, microbatches(x, 8))[0]

    w, x = struct(mesh, (512, 256), "fsdp"), struct(mesh, (128, 64, 512), ("dp", "fsdp"))
    return jax.jit(step), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
