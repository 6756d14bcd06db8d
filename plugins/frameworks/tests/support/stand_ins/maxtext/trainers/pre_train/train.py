"""A step: two products, and a descent along their gradients, in microbatches."""

import jax
import jax.numpy as jnp


def train_step(model, config, state_shardings, params_shardings, state, batch):
    del model, state_shardings, params_shardings

    def loss(params, rows):
        def layer(params, rows):
            return jnp.tanh(rows @ params["up"]) @ params["down"]

        layer = jax.checkpoint(layer) if config.remat_policy == "full" else layer
        return jnp.mean((layer(params, rows) - rows) ** 2)

    parts = batch.reshape(config.gradient_accumulation_steps, -1, batch.shape[-1])
    value, gradients = jax.lax.scan(
        lambda _, rows: (None, jax.value_and_grad(loss)(state, rows)), None, parts
    )[1]
    state = jax.tree.map(lambda p, g: p - 1e-3 * g.mean(0), state, gradients)
    return state, {"loss": value.mean()}
