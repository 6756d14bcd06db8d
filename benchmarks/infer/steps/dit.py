"""Diffusion transformer: patches, adaptive norms of six pieces, class labels dropped, an EMA; the
state is a dataclass."""

import sys
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
SIDE, PATCH, CHANNELS, WIDTH, LAYERS, HEADS, CLASSES, BATCH = (
    (32, 2, 4, 1152, 8, 16, 1000, 16) if LARGE else (8, 2, 4, 64, 2, 4, 10, 8)
)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "ema", "opt", "rng"],
    meta_fields=[],
)
@dataclass
class TrainState:
    step: jax.Array
    params: dict
    ema: dict
    opt: tuple
    rng: jax.Array


def init(key):
    keys = iter(jax.random.split(key, 10 + 8 * LAYERS))
    normal = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    return {
        "patch": normal(PATCH * PATCH * CHANNELS, WIDTH),
        "time": normal(256, WIDTH),
        "label": normal(CLASSES + 1, WIDTH),
        "blocks": [
            {
                "adaptive": normal(WIDTH, 6 * WIDTH),
                "qkv": normal(WIDTH, 3, HEADS, WIDTH // HEADS),
                "out": normal(HEADS, WIDTH // HEADS, WIDTH),
                "fc1": normal(WIDTH, 4 * WIDTH),
                "fc2": normal(4 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ],
        "final": normal(WIDTH, PATCH * PATCH * CHANNELS),
    }


def norm(x, shift, scale):
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * (1 + scale[:, None]) + shift[:, None]


def model(p, x, t, y):
    b, n = x.shape[0], SIDE // PATCH
    x = x.reshape(b, n, PATCH, n, PATCH, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(b, n * n, -1) @ p["patch"]
    angles = t[:, None] * jnp.exp(-jnp.arange(128) / 128 * 9.2)
    c = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1) @ p["time"] + p["label"][y]
    for w in p["blocks"]:
        parts = jnp.split(jax.nn.silu(c) @ w["adaptive"], 6, axis=-1)
        q, k, v = jnp.einsum("bnd,dchk->cbhnk", norm(x, parts[0], parts[1]), w["qkv"])
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / (WIDTH // HEADS) ** 0.5)
        x = x + parts[2][:, None] * jnp.einsum("bhnk,hkd->bnd", weights @ v, w["out"])
        h = jax.nn.gelu(norm(x, parts[3], parts[4]) @ w["fc1"]) @ w["fc2"]
        x = x + parts[5][:, None] * h
    x = x @ p["final"]
    x = x.reshape(b, n, n, PATCH, PATCH, CHANNELS).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, SIDE, SIDE, CHANNELS)


optimizer = optax.adamw(1e-4)


@partial(jax.jit, donate_argnames="state")
def train_step(state, latents, labels):
    rng, time_rng, noise_rng, drop_rng = jax.random.split(state.rng, 4)

    def loss_fn(params):
        t = jax.random.uniform(time_rng, (latents.shape[0],))
        noise = jax.random.normal(noise_rng, latents.shape)
        dropped = jax.random.bernoulli(drop_rng, 0.1, labels.shape)
        mixed = (1 - t[:, None, None, None]) * latents + t[:, None, None, None] * noise
        velocity = model(params, mixed, 1000 * t, jnp.where(dropped, CLASSES, labels))
        return jnp.mean((velocity - (noise - latents)) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    updates, opt = optimizer.update(grads, state.opt, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = jax.tree.map(lambda e, p: e * 0.9999 + p * 0.0001, state.ema, params)
    return TrainState(state.step + 1, params, ema, opt, rng), {"loss": loss}


params = jax.jit(init)(jax.random.key(0))
state = TrainState(
    jnp.array(0), params, jax.tree.map(jnp.copy, params), optimizer.init(params), jax.random.key(1)
)
for i in range(10):
    data = np.random.default_rng(i)
    latents = data.normal(size=(BATCH, SIDE, SIDE, CHANNELS)).astype(np.float32)
    state, info = train_step(state, latents, data.integers(0, CLASSES, BATCH))
print(float(info["loss"]))
