"""Gradients of bfloat16 weights are averaged over devices in float32, and narrowed again.

finding: wide-reduction
mesh: dp:-1
line: 23
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def gradient(w, x):
        g = jax.grad(lambda w: jnp.mean((x @ w).astype(jnp.float32) ** 2))(w)
        if broken:
            g = g.astype(jnp.float32)
        return jax.lax.pmean(g, "dp").astype(w.dtype)

    def step(w, x):
        specs = {"in_specs": (P(), P("dp")), "out_specs": P(), "check_vma": False}
        return w - jax.shard_map(gradient, mesh=mesh, **specs)(w, x)

    args = struct(mesh, (1024, 2048)), struct(mesh, (2048, 1024), "dp")
    return jax.jit(step, donate_argnums=0), args


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
