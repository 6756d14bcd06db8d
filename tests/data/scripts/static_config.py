"""A jitted step with a static config object among its arguments, and a keyword argument."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 2
    activation: str = "tanh"
    batch_axes: tuple = ("dp", "fsdp")


def step(params, config, batch, *, scale):
    def loss_of(weights):
        hidden = batch
        for layer in range(config.layers):
            hidden = getattr(jnp, config.activation)(hidden @ weights[layer])
        return jnp.mean(hidden**2) * scale

    loss, grads = jax.value_and_grad(loss_of)(params)
    return params - 0.1 * grads, loss


def build(mesh, layers=2):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    config = Config(layers=layers)
    return automesh.Workload(
        jax.jit(step, static_argnums=1, donate_argnums=0),
        (struct((layers, 32, 32), None, "fsdp", "tp"), config, struct((16, 32), config.batch_axes)),
        {"scale": struct(())},
        facts={"layers": layers},
    )
