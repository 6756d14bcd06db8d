"""Every hundredth call has a static argument of its own, and is another program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(), 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
w = jax.device_put(jnp.full((256, 256), 0.01, jnp.float32), NamedSharding(mesh, P(None, "model")))


@partial(jax.jit, donate_argnums=0, static_argnames="log")
def train_step(w, x, log=False):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    norms = (
        {f"norm_{i}": jnp.linalg.norm(part) for i, part in enumerate(jnp.split(w, 64))}
        if log
        else {}
    )
    return w - 0.1 * grad, loss, norms


for step in range(1000):
    rows = np.random.default_rng(step).normal(size=(64, 256)).astype(np.float32)
    w, loss, norms = train_step(
        w, jax.device_put(rows, NamedSharding(mesh, P("data", None))), log=step % 100 == 0
    )
    loss.block_until_ready()
