"""Explicit axes: the shardings are part of the types."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh


def step(w, x):
    def loss_of(w):
        hidden = jnp.einsum("bi,ij->bj", x, w["up"], out_sharding=P("dp", "tp"))
        y = jnp.einsum("bj,ji->bi", jnp.tanh(hidden), w["down"], out_sharding=P("dp", None))
        return jnp.mean((y - x) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w = {"up": struct((16, 32), None, "tp"), "down": struct((32, 16), "tp", None)}
    return automesh.Workload(
        jax.jit(step, donate_argnums=0),
        (w, struct((8, 16), "dp", None)),
        axis_types="explicit",
        context=lambda: jax.set_mesh(mesh),
    )
