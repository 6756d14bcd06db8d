"""CLIP: images and captions embedded apart and compared with one another over the batch, the
temperature learned; a target network follows by means."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
PATCHES, PIXELS, VOCAB, LENGTH, WIDTH, SHARED, LAYERS, BATCH = (
    (64, 768, 16384, 64, 1024, 512, 4, 64) if LARGE else (16, 48, 256, 16, 64, 32, 2, 16)
)


def block_init(key, width):
    a, b = jax.random.split(key)
    return {
        "mix": 0.02 * jax.random.normal(a, (width, 4 * width)),
        "out": 0.02 * jax.random.normal(b, (4 * width, width)),
        "g": jnp.ones(width),
    }


def tower_init(key):
    *keys, last = jax.random.split(key, LAYERS + 1)
    return {
        "blocks": {str(i): block_init(k, WIDTH) for i, k in enumerate(keys)},
        "projection": 0.02 * jax.random.normal(last, (WIDTH, SHARED)),
    }


def tower(p, x):
    for w in p["blocks"].values():
        h = w["g"] * x / jnp.linalg.norm(x, axis=-1, keepdims=True) * WIDTH**0.5
        h = h + h.mean(1, keepdims=True)
        x = x + jax.nn.gelu(h @ w["mix"]) @ w["out"]
    z = x.mean(1) @ p["projection"]
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def loss_fn(params, images, captions):
    z1 = tower(params["image"], images @ params["patch"] + params["place"])
    z2 = tower(params["text"], params["word"][captions])
    logits = jnp.exp(params["temperature"]) * z1 @ z2.T
    labels = jnp.arange(len(images))
    ce = optax.softmax_cross_entropy_with_integer_labels
    return (ce(logits, labels).mean() + ce(logits.T, labels).mean()) / 2


tx = optax.adam(1e-3)


@jax.jit
def train(state, images, captions):
    loss, grads = jax.value_and_grad(loss_fn)(state["online"], images, captions)
    updates, opt = tx.update(grads, state["opt"])
    online = optax.apply_updates(state["online"], updates)
    target = optax.incremental_update(online, state["target"], 0.01)
    return {"online": online, "target": target, "opt": opt}, loss


keys = jax.random.split(jax.random.key(0), 5)
online = {
    "image": tower_init(keys[0]),
    "text": tower_init(keys[1]),
    "patch": 0.02 * jax.random.normal(keys[2], (PIXELS, WIDTH)),
    "place": 0.02 * jax.random.normal(keys[3], (PATCHES, WIDTH)),
    "word": 0.02 * jax.random.normal(keys[4], (VOCAB, WIDTH)),
    "temperature": jnp.array(2.0),
}
state = {"online": online, "target": online, "opt": tx.init(online)}
for i in range(10):
    rng = np.random.default_rng(i)
    images = rng.normal(size=(BATCH, PATCHES, PIXELS)).astype(np.float32)
    state, loss = train(state, images, rng.integers(0, VOCAB, (BATCH, LENGTH)))
print(float(loss))
