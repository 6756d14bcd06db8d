"""Asks for virtual CPU devices by jax's setting, and has no other batch than its first."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
w = jax.device_put(jax.random.normal(jax.random.key(0), (64, 128)), NamedSharding(mesh, P()))
x = jax.device_put(jax.random.normal(jax.random.key(1), (64, 64)), NamedSharding(mesh, P("data")))


@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


for _ in range(100):
    w, loss = train_step(w, x)
