"""Diffusion U-Net in Equinox: channels first, one example vmapped, an EMA of the model."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
SIDE, WIDTH, BATCH = (64, 256, 16) if LARGE else (16, 32, 16)


class ResidualBlock(eqx.Module):
    norm1: eqx.nn.GroupNorm
    conv1: eqx.nn.Conv2d
    time: eqx.nn.Linear
    norm2: eqx.nn.GroupNorm
    conv2: eqx.nn.Conv2d
    skip: eqx.nn.Conv2d

    def __init__(self, before, after, *, key):
        keys = jax.random.split(key, 4)
        self.norm1 = eqx.nn.GroupNorm(8, before)
        self.conv1 = eqx.nn.Conv2d(before, after, 3, padding=1, key=keys[0])
        self.time = eqx.nn.Linear(WIDTH, after, key=keys[1])
        self.norm2 = eqx.nn.GroupNorm(8, after)
        self.conv2 = eqx.nn.Conv2d(after, after, 3, padding=1, key=keys[2])
        self.skip = eqx.nn.Conv2d(before, after, 1, key=keys[3])

    def __call__(self, x, t):
        h = self.conv1(jax.nn.silu(self.norm1(x)))
        h = h + self.time(jax.nn.silu(t))[:, None, None]
        h = self.conv2(jax.nn.silu(self.norm2(h)))
        return h + self.skip(x)


class UNet(eqx.Module):
    time1: eqx.nn.Linear
    time2: eqx.nn.Linear
    first: eqx.nn.Conv2d
    down: list
    shrink: list
    middle: ResidualBlock
    up: list
    grow: list
    last: eqx.nn.Conv2d

    def __init__(self, *, key):
        keys = iter(jax.random.split(key, 20))
        widths = [WIDTH, 2 * WIDTH, 4 * WIDTH]
        self.time1 = eqx.nn.Linear(WIDTH, WIDTH, key=next(keys))
        self.time2 = eqx.nn.Linear(WIDTH, WIDTH, key=next(keys))
        self.first = eqx.nn.Conv2d(3, WIDTH, 3, padding=1, key=next(keys))
        self.down = [ResidualBlock(w, w, key=next(keys)) for w in widths[:-1]]
        self.shrink = [
            eqx.nn.Conv2d(a, b, 3, stride=2, padding=1, key=next(keys))
            for a, b in zip(widths[:-1], widths[1:])
        ]
        self.middle = ResidualBlock(widths[-1], widths[-1], key=next(keys))
        self.grow = [
            eqx.nn.ConvTranspose2d(b, a, 4, stride=2, padding=1, key=next(keys))
            for a, b in zip(widths[:-1], widths[1:])
        ]
        self.up = [ResidualBlock(2 * w, w, key=next(keys)) for w in widths[:-1]]
        self.last = eqx.nn.Conv2d(WIDTH, 3, 1, key=next(keys))

    def __call__(self, x, t):
        frequencies = jnp.exp(-jnp.linspace(0, 8, WIDTH // 2))
        t = jnp.concatenate([jnp.sin(1000 * t * frequencies), jnp.cos(1000 * t * frequencies)])
        t = self.time2(jax.nn.silu(self.time1(t)))
        x = self.first(x)
        skips = []
        for block, shrink in zip(self.down, self.shrink):
            x = block(x, t)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x, t)
        for block, grow in zip(self.up[::-1], self.grow[::-1]):
            x = block(jnp.concatenate([grow(x), skips.pop()]), t)
        return self.last(x)


def loss_fn(model, images, key):
    t_key, noise_key = jax.random.split(key)
    t = jax.random.uniform(t_key, (images.shape[0],))
    noise = jax.random.normal(noise_key, images.shape)
    alpha = jnp.cos(t * jnp.pi / 2)[:, None, None, None]
    sigma = jnp.sin(t * jnp.pi / 2)[:, None, None, None]
    predicted = jax.vmap(model)(alpha * images + sigma * noise, t)
    return jnp.mean((predicted - noise) ** 2)


@eqx.filter_jit
def make_step(model, ema, opt_state, images, key):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, images, key)
    updates, opt_state = optimizer.update(grads, opt_state)
    model = eqx.apply_updates(model, updates)
    ema = jax.tree.map(
        lambda e, p: 0.999 * e + 0.001 * p if eqx.is_inexact_array(e) else e, ema, model
    )
    return loss, model, ema, opt_state


model = UNet(key=jax.random.key(0))
ema = model
optimizer = optax.adam(1e-4)
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
rng = np.random.default_rng(0)
key = jax.random.key(1)
for step in range(10):
    key, sub = jax.random.split(key)
    images = rng.normal(size=(BATCH, 3, SIDE, SIDE)).astype(np.float32)
    loss, model, ema, opt_state = make_step(model, ema, opt_state, images, sub)
print(float(loss))
