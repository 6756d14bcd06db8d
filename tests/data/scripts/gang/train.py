"""A step of two layers, for searches of several processes."""

import os

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

if "AUTOMESH_GANG" in os.environ:  # As a script does that a launcher starts on several hosts.
    jax.distributed.initialize()


def build(mesh):
    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - x) ** 2)

    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    w = {"up": struct((128, 256), None, "tp"), "down": struct((256, 128), "tp", None)}
    return jax.jit(step, donate_argnums=0), (w, struct((64, 128), "dp"))
