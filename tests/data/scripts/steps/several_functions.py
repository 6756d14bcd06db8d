"""A step in Python that calls several jitted functions: gradients, a filter, an update."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@jax.jit
def gradients(w, x):
    return jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2))(w)


@jax.jit
def clipped(grads):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads), norm


def update(w, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads)


update = jax.jit(update, donate_argnums=(0, 1))


def step(w, x):
    loss, grads = gradients(w, x)
    grads, norm = clipped(grads)
    return update(w, grads), {"loss": loss, "norm": norm}


def build(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w = {"up": struct((16, 32), None, "tp"), "down": struct((32, 16), "tp", None)}
    return step, (w, struct((8, 16), "dp"))
