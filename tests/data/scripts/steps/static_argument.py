"""A config object and a flag among the arguments, both static, and a batch that carries a name."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 2
    activation: str = "tanh"


@functools.partial(jax.jit, static_argnames=("config", "train"), donate_argnames="w")
def step(config, train, w, x):
    def loss_of(w):
        hidden = x
        for _ in range(config.layers):
            hidden = getattr(jnp, config.activation)(hidden @ w)
        return jnp.mean(hidden**2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return (w - 0.1 * grad if train else w), loss


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    return step, (Config(), True, struct((32, 32), None, "tp"), struct((8, 32), "dp"))
