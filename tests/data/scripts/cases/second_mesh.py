"""The batch lies on another mesh of the same devices."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
w = jax.device_put(np.ones((64, 128), np.float32), NamedSharding(mesh, P("data")))


@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


for _ in range(100):
    other = Mesh(np.array(jax.devices()), ("devices",))
    x = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(other, P("devices")))
    w, loss = train_step(w, x)
