"""A function with a backward pass of its own, and one with a forward derivative of its own."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x * 8) / 8


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


@jax.custom_jvp
def soft(x):
    return jnp.log1p(jnp.exp(x))


@soft.defjvp
def _(primals, tangents):
    return soft(primals[0]), jax.nn.sigmoid(primals[0]) * tangents[0]


def step(w, x):
    def loss_of(w):
        return jnp.mean(soft(x @ straight_through(w)) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * grad, loss


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return jax.jit(step, donate_argnums=0), (struct((16, 32), None, "tp"), struct((8, 16), "dp"))
