"""The step returns its new state and nothing else."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
w = jax.device_put(
    jax.random.normal(jax.random.key(0), (64, 128)), NamedSharding(mesh, P(None, "model"))
)
x = jax.device_put(jax.random.normal(jax.random.key(1), (64, 64)), NamedSharding(mesh, P("data")))


@jax.jit
def train_step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


for _ in range(100):
    w = train_step(w, x)
