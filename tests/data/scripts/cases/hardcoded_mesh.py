"""Names the sizes of its mesh, and asks for as many devices in its first line."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(mesh_utils.create_device_mesh((2, 2)), ("data", "model"))
w = jax.device_put(
    jax.random.normal(jax.random.key(0), (64, 128)), NamedSharding(mesh, P(None, "model"))
)
x = jax.device_put(jax.random.normal(jax.random.key(1), (64, 64)), NamedSharding(mesh, P("data")))


@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


for _ in range(100):
    w, loss = train_step(w, x)
