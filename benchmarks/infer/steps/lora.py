"""LoRA: frozen weights of a stacked transformer, adapters alone have gradients and moments."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, RANK, BATCH, LENGTH = (
    (32000, 2048, 5632, 8, 16, 16, 8, 512) if LARGE else (512, 128, 256, 2, 4, 8, 8, 32)
)


def weights(key):
    k = jax.random.split(key, 8)
    make = lambda key, *shape: 0.02 * jax.random.normal(key, shape, jnp.bfloat16)
    return {
        "embed": make(k[0], VOCAB, WIDTH),
        "q": make(k[1], LAYERS, WIDTH, WIDTH),
        "k": make(k[2], LAYERS, WIDTH, WIDTH),
        "v": make(k[3], LAYERS, WIDTH, WIDTH),
        "o": make(k[4], LAYERS, WIDTH, WIDTH),
        "up": make(k[5], LAYERS, WIDTH, HIDDEN),
        "down": make(k[6], LAYERS, HIDDEN, WIDTH),
        "head": make(k[7], WIDTH, VOCAB),
    }


def adapters(key):
    a = 0.01 * jax.random.normal(key, (LAYERS, WIDTH, RANK))
    return {n: {"a": a, "b": jnp.zeros((LAYERS, RANK, WIDTH))} for n in ("q", "v")}


def layer(x, both):
    w, lora = both
    b, t, d = x.shape

    def adapted(name, x):
        low = x @ lora[name]["a"].astype(x.dtype) @ lora[name]["b"].astype(x.dtype)
        return x @ w[name] + 2.0 * low

    h = x / (jnp.abs(x).mean(-1, keepdims=True) + 1e-3)
    split = lambda y: y.reshape(b, t, HEADS, d // HEADS)
    q, k, v = split(adapted("q", h)), split(h @ w["k"]), split(adapted("v", h))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / (d // HEADS) ** 0.5
    scores = jnp.where(jnp.arange(t)[:, None] >= jnp.arange(t), scores, -1e9)
    attended = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(x.dtype), v)
    x = x + attended.reshape(b, t, d) @ w["o"]
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def loss_fn(lora, frozen, batch):
    x = frozen["embed"][batch["tokens"]]
    stacked = {name: frozen[name] for name in ("q", "k", "v", "o", "up", "down")}
    x, _ = jax.lax.scan(layer, x, (stacked, lora))
    logits = (x @ frozen["head"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


tx = optax.adamw(1e-4)


@jax.jit
def train_step(lora, opt_state, frozen, batch):
    loss, grads = jax.value_and_grad(loss_fn)(lora, frozen, batch)
    updates, opt_state = tx.update(grads, opt_state, lora)
    return optax.apply_updates(lora, updates), opt_state, loss


frozen = jax.jit(weights)(jax.random.key(0))
lora = adapters(jax.random.key(1))
opt_state = tx.init(lora)
rng = np.random.default_rng(0)
for step in range(10):
    tokens = rng.integers(0, VOCAB, (BATCH, LENGTH), dtype=np.int32)
    mask = (rng.random((BATCH, LENGTH)) > 0.1).astype(np.float32)
    batch = {"tokens": tokens, "labels": np.roll(tokens, -1, 1), "mask": mask}
    lora, opt_state, loss = train_step(lora, opt_state, frozen, batch)
print(float(loss))
