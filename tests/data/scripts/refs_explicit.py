"""A step that updates references in place and returns metrics alone, under Explicit axes."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh

WIDTH, BATCH = 32, 16


def step(weights, momentum, inputs):
    def loss_of(w):
        return jnp.mean((jnp.sin(inputs @ w) - inputs) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(weights[...])
    momentum[...] = 0.9 * momentum[...] + grad
    weights[...] = weights[...] - 0.1 * momentum[...]
    return {"loss": loss}


def build(mesh):
    def struct(shape, *spec, is_ref=False):
        placed = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed, is_ref=is_ref)

    return automesh.Workload(
        step,
        (
            struct((WIDTH, WIDTH), None, "tp", is_ref=True),
            struct((WIDTH, WIDTH), None, "tp", is_ref=True),
            struct((BATCH, WIDTH), ("dp", "fsdp"), None),
        ),
        axis_types="explicit",
        context=jax.set_mesh(mesh),
        facts={"batch": BATCH, "width": WIDTH},
    )
