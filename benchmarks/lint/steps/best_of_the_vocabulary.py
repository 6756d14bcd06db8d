"""`top_k` over a vocabulary that tp splits.

finding: undivided-operation
mesh: tp:-1
line: 26
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def best(logits):
        values, _ = jax.lax.top_k(logits, 8)
        return jax.lax.all_gather(values, "tp", axis=1, tiled=True)

    def step(w, x):
        logits = x @ w
        if broken:
            return jax.lax.top_k(logits, 8)[0]
        specs = {"in_specs": P(None, "tp"), "out_specs": P(), "check_vma": False}
        return jax.lax.top_k(jax.shard_map(best, mesh=mesh, **specs)(logits), 8)[0]

    return jax.jit(step), (struct(mesh, (256, 16384), None, "tp"), struct(mesh, (512, 256)))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
