"""A residual network of dense layers; the step divides its batch into micro-batches."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
WIDTH, HIDDEN, LAYERS, OUT, ACCUMULATE, BATCH = (
    (2048, 8192, 4, 1024, 4, 512) if LARGE else (64, 256, 2, 16, 4, 64)
)


def init(key):
    keys = jax.random.split(key, 2 * LAYERS + 1)
    normal = lambda key, *shape: jax.random.normal(key, shape) * shape[0] ** -0.5
    blocks = [
        {"up": normal(a, WIDTH, HIDDEN), "down": normal(b, HIDDEN, WIDTH)}
        for a, b in zip(keys[:-1:2], keys[1::2])
    ]
    return {"blocks": blocks, "out": normal(keys[-1], WIDTH, OUT)}


def loss_fn(params, x, y):
    for block in params["blocks"]:
        x = x + jax.nn.gelu(x @ block["up"]) @ block["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], y).mean()


tx = optax.adamw(1e-3)


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, batch):
    micro = jax.tree.map(lambda a: a.reshape(ACCUMULATE, -1, *a.shape[1:]), batch)

    def accumulate(carry, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch["x"], batch["y"])
        return jax.tree.map(jnp.add, carry, (loss, grads)), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(accumulate, zeros, micro)
    grads = jax.tree.map(lambda g: g / ACCUMULATE, grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss / ACCUMULATE


params = jax.jit(init)(jax.random.key(0))
opt_state = tx.init(params)
for step in range(10):
    rng = np.random.default_rng(step)
    batch = {
        "x": rng.normal(size=(BATCH, WIDTH)).astype(np.float32),
        "y": rng.integers(0, OUT, BATCH),
    }
    params, opt_state, loss = train_step(params, opt_state, batch)
print(float(loss))
