"""The gradients of bfloat16 weights are reduced in float32 and rounded afterwards.

finding: wide-reduction
mesh: dp:-1
line: 23
only: cpu gpu
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def step(w, x):
        def loss(w):
            wide = jnp.float32 if broken else jnp.bfloat16
            y = jnp.dot(x, w, preferred_element_type=wide)
            return jnp.mean(y.astype(jnp.bfloat16) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w = struct(mesh, (1024, 1024), dtype=jnp.bfloat16)
    x = struct(mesh, (1024, 1024), "dp", dtype=jnp.bfloat16)
    return jax.jit(step, donate_argnums=0), (w, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
