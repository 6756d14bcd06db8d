"""The random numbers of its batches have no seed."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
w = jax.device_put(
    jax.random.normal(jax.random.key(0), (64, 128)), NamedSharding(mesh, P(None, "model"))
)


@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


for _ in range(100):
    x = jax.device_put(
        np.random.normal(size=(32, 64)).astype("float32"), NamedSharding(mesh, P("data"))
    )
    w, loss = train_step(w, x)
