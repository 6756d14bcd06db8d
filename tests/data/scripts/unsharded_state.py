"""Parameters with shardings, optimizer state without: it gets those that come out of `init`."""

import adamw
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh

SPECS = {"up": P("fsdp", "tp"), "down": P("tp", "fsdp")}


def waves(shape):
    return jnp.sin(jnp.arange(shape[0] * shape[1], dtype=jnp.float32) ** 1.5).reshape(shape)


def initial(mesh):
    shapes = {"up": (adamw.FEATURES, adamw.HIDDEN), "down": (adamw.HIDDEN, adamw.TARGETS)}
    params = {
        name: jax.lax.with_sharding_constraint(
            waves(shapes[name]) / 8, NamedSharding(mesh, SPECS[name])
        )
        for name in SPECS
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    return params, zeros, zeros, jnp.zeros((), jnp.int32)


def build(mesh):
    placed = NamedSharding(mesh, P(("dp", "fsdp")))
    state = jax.eval_shape(lambda: initial(mesh))
    params = {
        name: leaf.update(sharding=NamedSharding(mesh, SPECS[name]))
        for name, leaf in state[0].items()
    }

    def init(mesh):
        inputs = waves((adamw.BATCH, adamw.FEATURES))
        return initial(mesh), inputs, inputs[:, : adamw.TARGETS] * 0.5

    return automesh.Workload(
        adamw.step,
        (
            (params, *state[1:]),
            jax.ShapeDtypeStruct((adamw.BATCH, adamw.FEATURES), jnp.float32, sharding=placed),
            jax.ShapeDtypeStruct((adamw.BATCH, adamw.TARGETS), jnp.float32, sharding=placed),
        ),
        donate_argnums=0,
        init=init,
        baseline="dp:-1",
        tokens_per_step=adamw.BATCH,
    )
