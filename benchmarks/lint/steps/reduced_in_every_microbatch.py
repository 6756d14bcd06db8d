"""openxla/xla#19166: on CPUs the gradient is reduced in every microbatch.

finding: gradient-per-microbatch
mesh: dp:-1
line: 20
only: cpu
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
    n = 4 if broken else 1

    def step(w, x):
        parts = x.reshape(64 // n, n, 64, 512).swapaxes(0, 1)

        def body(total, part):
            return total + jax.grad(loss)(w, part), None

        g, _ = jax.lax.scan(body, jnp.zeros_like(w), parts)
        return w - 0.1 * g

    return jax.jit(step, donate_argnums=0), (
        struct(mesh, (512, 1024)),
        struct(mesh, (64, 64, 512), "dp"),
    )


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
