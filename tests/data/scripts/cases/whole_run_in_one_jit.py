"""The whole training is one jitted call. It has no mesh."""

import jax
import jax.numpy as jnp


def train(key):
    w = 0.1 * jax.random.normal(key, (64, 64))

    def update(carry, _):
        w, key = carry
        key, sub = jax.random.split(key)
        x = jax.random.normal(sub, (256, 64))
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x) ** 2))(w)
        return (w - 0.1 * slope, key), loss

    return jax.lax.scan(update, (w, key), None, 2000)


_, losses = jax.jit(train)(jax.random.key(0))
print(float(losses[-1]))
