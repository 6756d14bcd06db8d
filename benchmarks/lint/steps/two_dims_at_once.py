"""jax-ml/jax#21562, openxla/xla#15207: two dimensions change their axes in one constraint.

finding: full-rematerialization
mesh: dp:-1,tp:2
line: 29
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    first, between = P("tp", None, "dp"), P("tp", "dp", None)
    last = P(None, ("dp", "tp"), None)

    def to(x, spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def step(w, x):
        y = to(jnp.tanh(x * w), first)
        if not broken:
            y = to(y, between)
        y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, last))
        return jnp.mean(y**2)

    return jax.jit(step), (struct(mesh, (512,), "dp"), struct(mesh, (64, 256, 512), *first))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
