"""openxla/xla#47945: a convolution with groups, whose batch dp splits.

finding: undivided-operation
mesh: dp:-1
line: 23
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    groups = 4 if broken else 1
    numbers = ("NHWC", "HWIO", "NHWC")

    def convolve(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def step(k, x):
        value, g = jax.value_and_grad(lambda k: jnp.mean(jax.nn.relu(convolve(x, k)) ** 2))(k)
        return k - 0.1 * g, value

    k = struct(mesh, (3, 3, 64 // groups, 64))
    return jax.jit(step, donate_argnums=0), (k, struct(mesh, (64, 32, 32, 64), "dp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
