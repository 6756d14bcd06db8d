"""A step whose batch and learning rate are keyword arguments, one of them static."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh


@functools.partial(jax.jit, static_argnames="clip", donate_argnums=0)
def step(w, *, batch, rate, clip=False):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(w)
    if clip:
        grad = jnp.clip(grad, -1.0, 1.0)
    return w - rate * grad, loss


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    batch = {"x": struct((8, 16), "dp"), "y": struct((8, 32), "dp")}
    kwargs = {"batch": batch, "rate": 0.1, "clip": True}
    return automesh.Workload(step, (struct((16, 32), None, "tp"),), kwargs)
