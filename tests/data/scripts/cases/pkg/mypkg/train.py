"""Run as `python -m mypkg.train`; a module of its package has the name of a library."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mypkg import optax as own

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
w = jax.device_put(jax.random.normal(jax.random.key(0), (64, 128)), NamedSharding(mesh, P()))
x = jax.device_put(jax.random.normal(jax.random.key(1), (64, 64)), NamedSharding(mesh, P("data")))
tx = optax.sgd(own.RATE)


@jax.jit
def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return optax.apply_updates(w, tx.update(grad, tx.init(w))[0]), loss


for _ in range(20):
    w, loss = train_step(w, x)
