"""Micro batches come first: the batch is the second dimension."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MICRO, ROWS, WIDTH = 2, 32, 128
n = jax.device_count()
mesh = jax.make_mesh((n // 8, 8), ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
w = jax.device_put(
    jnp.full((WIDTH, WIDTH), 0.01, jnp.float32), NamedSharding(mesh, P(None, "data"))
)
batch_at = NamedSharding(mesh, P(None, ("replica", "data"), None))


@partial(jax.jit, donate_argnums=0)
def train_step(w, batch):
    def micro(total, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)
        return total + grad, loss

    grads, losses = jax.lax.scan(micro, jnp.zeros_like(w), batch)
    return w - 0.1 * grads / MICRO, losses.mean()


for step in range(10):
    rows = np.random.default_rng(step).normal(size=(MICRO, ROWS, WIDTH)).astype(np.float32)
    w, loss = train_step(w, jax.device_put(rows, batch_at))
    print(step, float(loss))
