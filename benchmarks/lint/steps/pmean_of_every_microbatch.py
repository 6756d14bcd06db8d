"""A `jax.shard_map` that averages over devices inside of the loop over microbatches.

finding: gradient-per-microbatch
mesh: dp:-1
line: 27
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
    def gradient(w, parts):
        def body(total, part):
            g = jax.grad(loss)(w, part)
            if broken:
                g = jax.lax.pmean(g, "dp")
            return total + g, None

        total, _ = jax.lax.scan(body, jnp.zeros_like(w), parts)
        return total if broken else jax.lax.pmean(total, "dp")

    def step(w, parts):
        specs = {"in_specs": (P(), P(None, "dp")), "out_specs": P(), "check_vma": False}
        return w - 0.1 * jax.shard_map(gradient, mesh=mesh, **specs)(w, parts)

    parts = struct(mesh, (4, 256, 1024), None, "dp")
    return jax.jit(step, donate_argnums=0), (struct(mesh, (1024, 1024)), parts)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
