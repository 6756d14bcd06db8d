"""`jax.set_mesh` stays in force; and the script reads numbers before its step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

assert jax.sharding.get_mesh().empty, "a mesh is in force before the script made one"
key = jax.random.key(0)

mesh = jax.make_mesh(
    (jax.device_count(), 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2
)
jax.set_mesh(mesh)
w = jax.device_put(0.1 * jax.random.normal(key, (256, 256)), P(None, "model"))
# The script wants numbers that a run without arrays has not got.
seed = np.asarray(jax.random.key_data(key))


@partial(jax.jit, donate_argnums=0)
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


for step in range(10):
    rows = np.random.default_rng([*seed, step]).normal(size=(64, 256)).astype(np.float32)
    w, loss = train_step(w, jax.device_put(rows, P("data", None)))
