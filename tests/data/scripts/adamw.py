"""A two-layer regression with AdamW written out: second moments go under a square root."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

FEATURES, HIDDEN, TARGETS, BATCH = 32, 64, 16, 16


def loss_of(params, inputs, targets):
    hidden = jnp.tanh(inputs @ params["up"])
    return jnp.mean((hidden @ params["down"] - targets) ** 2)


def adamw(params, grads, mean, square, count, rate=1e-2, decay=1e-4):
    count = count + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, grads)

    def update(p, m, v):
        m, v = m / (1 - 0.9**count), v / (1 - 0.99**count)
        return p - rate * (m / (jnp.sqrt(v) + 1e-8) + decay * p)

    return jax.tree.map(update, params, mean, square), mean, square, count


def step(state, inputs, targets):
    params, mean, square, count = state
    loss, grads = jax.value_and_grad(loss_of)(params, inputs, targets)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return adamw(params, grads, mean, square, count), {"loss": loss, "norm": norm}


def build(mesh, donate=True):
    def struct(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    params = {
        "up": struct((FEATURES, HIDDEN), "fsdp", "tp"),
        "down": struct((HIDDEN, TARGETS), "tp", "fsdp"),
    }
    state = (params, params, params, struct((), dtype=jnp.int32))
    batch = struct((BATCH, FEATURES), ("dp", "fsdp")), struct((BATCH, TARGETS), ("dp", "fsdp"))
    return jax.jit(step, donate_argnums=(0,) if donate else ()), (state, *batch)
