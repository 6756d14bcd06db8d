"""pytorch/xla#8883: what adds up the gradients is constrained to be whole.

finding: replicated-gradient
mesh: fsdp:-1
line: 29
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
    w, x = struct(mesh, (1024, 1024), "fsdp"), struct(mesh, (4, 64, 1024), None, "fsdp")
    kept = NamedSharding(mesh, P()) if broken else w.sharding

    def step(w, x):
        def body(total, part):
            g = total + jax.grad(loss)(w, part)
            return jax.lax.with_sharding_constraint(g, kept), None

        first = jax.lax.with_sharding_constraint(jnp.zeros((1024, 1024)), kept)
        return w - 0.1 * jax.lax.scan(body, first, x)[0]

    return jax.jit(step, donate_argnums=0), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
