"""Real arrays, donated, two of which are the same array."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def step(state, x):
    def loss_of(w):
        return jnp.mean((x @ w @ state["average"].T - x) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    w = state["w"] - 0.1 * grad
    return {"w": w, "average": 0.9 * state["average"] + 0.1 * w, "zero": state["zero"]}, loss


def build(mesh):
    w = jax.device_put(jnp.ones((16, 32)) / 16, NamedSharding(mesh, P(None, "tp")))
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("dp")))
    zero = jax.device_put(jnp.zeros(()), NamedSharding(mesh, P()))
    return jax.jit(step, donate_argnums=0), ({"w": w, "average": w, "zero": zero}, x)
