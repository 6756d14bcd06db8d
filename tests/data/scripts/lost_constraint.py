"""Samples its batch inside the step: without a constraint nothing says how to split the rows."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, WIDTH, HIDDEN = 16384, 2048, 8192


def build(mesh, constrained=True):
    def place(*spec):
        return NamedSharding(mesh, P(*spec))

    def loss_of(params, x):
        hidden = jax.nn.relu(x @ params["up"])  # THE LINE
        return jnp.mean((hidden @ params["down"] - x) ** 2)  # AND BACK

    def step(params, momentum, data, key):
        rows = jax.random.randint(key, (ROWS,), 0, data.shape[0])
        x = data[rows]
        if constrained:
            x = jax.lax.with_sharding_constraint(x, place("dp", None))
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        return params, momentum, loss

    def weights(up, down):
        return {
            "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.bfloat16, sharding=place(*up)),
            "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.bfloat16, sharding=place(*down)),
        }

    split = weights((None, "tp"), ("tp", None))
    data = jax.ShapeDtypeStruct((65536, WIDTH), jnp.bfloat16, sharding=place())
    key = jax.ShapeDtypeStruct((2,), jnp.uint32, sharding=place())
    return step, (split, split, data, key)
