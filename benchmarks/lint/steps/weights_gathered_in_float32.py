"""The weights of float8 products are gathered in float32, as the rounded ones are wanted whole.

finding: wide-gather
mesh: fsdp:-1
line: 28
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    narrow, whole = jnp.float8_e4m3fn, NamedSharding(mesh, P())
    split = NamedSharding(mesh, P("fsdp"))

    def step(weights, x):
        for w in weights:
            kept = w.astype(narrow)
            if not broken:
                kept = jax.lax.with_sharding_constraint(kept, split)
            kept = jax.lax.with_sharding_constraint(kept, whole)
            x = jnp.tanh(jnp.dot(x.astype(narrow), kept, preferred_element_type=jnp.bfloat16))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    weights = [struct(mesh, (1024, 1024), "fsdp") for _ in range(3)]
    return jax.jit(step), (weights, struct(mesh, (2048, 1024), "fsdp", dtype=jnp.bfloat16))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
