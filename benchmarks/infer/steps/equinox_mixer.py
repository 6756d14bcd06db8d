"""MLP mixer in Equinox: tokens and channels mixed in turn, labels smoothed, batch statistics."""

import sys

import equinox as eqx
import jax
import numpy as np
import optax

LARGE = "large" in sys.argv
PATCHES, PIXELS, WIDTH, TOKENS, HIDDEN, LAYERS, CLASSES, BATCH = (
    (256, 768, 1024, 512, 4096, 8, 1024, 32) if LARGE else (16, 48, 64, 32, 128, 2, 16, 16)
)


class Mixer(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    tokens: eqx.nn.MLP
    channels: eqx.nn.MLP

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.norm1 = eqx.nn.LayerNorm(WIDTH)
        self.norm2 = eqx.nn.LayerNorm(WIDTH)
        self.tokens = eqx.nn.MLP(PATCHES, PATCHES, TOKENS, 1, jax.nn.gelu, key=one)
        self.channels = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, jax.nn.gelu, key=two)

    def __call__(self, x):  # (patches, width)
        x = x + jax.vmap(self.tokens)(jax.vmap(self.norm1)(x).T).T
        return x + jax.vmap(self.channels)(jax.vmap(self.norm2)(x))


class Model(eqx.Module):
    patch: eqx.nn.Linear
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        first, last, *keys = jax.random.split(key, LAYERS + 2)
        self.patch = eqx.nn.Linear(PIXELS, WIDTH, key=first)
        self.blocks = [Mixer(k) for k in keys]
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=last)

    def __call__(self, x):
        x = jax.vmap(self.patch)(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


@eqx.filter_value_and_grad
def loss_fn(model, x, y):
    logits = jax.vmap(model)(x)
    target = optax.smooth_labels(jax.nn.one_hot(y, CLASSES), 0.1)
    return optax.softmax_cross_entropy(logits, target).mean()


@eqx.filter_jit
def step(model, opt_state, x, y):
    loss, grads = loss_fn(model, x, y)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


model = Model(jax.random.key(0))
tx = optax.adamw(1e-3)
opt_state = tx.init(eqx.filter(model, eqx.is_array))
rng = np.random.default_rng(0)
for _ in range(10):
    x = rng.normal(size=(BATCH, PATCHES, PIXELS)).astype(np.float32)
    model, opt_state, loss = step(model, opt_state, x, rng.integers(0, CLASSES, BATCH))
print(float(loss))
