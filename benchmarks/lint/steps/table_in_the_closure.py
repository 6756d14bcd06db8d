"""A table that the step takes from around it is a constant of the program.

finding: baked-constant
mesh: dp:-1
line: 24
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


TABLE = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)


def make(mesh, broken):
    def of(table, w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ table @ w) ** 2))(w)
        return w - 0.1 * gradient, value

    def step(w, x):
        return of(jnp.asarray(TABLE), w, x)

    def given(w, x, table):
        return of(table, w, x)

    w, x = struct(mesh, (1024, 64)), struct(mesh, (2048, 1024), "dp")
    if broken:
        return jax.jit(step, donate_argnums=0), (w, x)
    return jax.jit(given, donate_argnums=0), (w, x, struct(mesh, (1024, 1024), "dp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
