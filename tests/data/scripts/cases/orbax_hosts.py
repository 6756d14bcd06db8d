"""Opens a manager of checkpoints, which asks who else is in the job."""

import tempfile
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(), 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
manager = ocp.CheckpointManager(
    tempfile.mkdtemp(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
)
w = jax.device_put(jnp.full((256, 256), 0.01, jnp.float32), NamedSharding(mesh, P(None, "model")))


@partial(jax.jit, donate_argnums=0)
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


for step in range(10):
    rows = np.random.default_rng(step).normal(size=(64, 256)).astype(np.float32)
    w, loss = train_step(w, jax.device_put(rows, NamedSharding(mesh, P("data", None))))
