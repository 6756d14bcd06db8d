"""nanoGPT: one matrix for q, k and v, weights tied, gradients of micro-batches added in a scan."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
VOCAB, WIDTH, LAYERS, HEADS, MICRO, BATCH, LENGTH = (
    (50304, 1536, 6, 16, 2, 8, 512) if LARGE else (512, 64, 2, 4, 2, 8, 32)
)


def init(key):
    keys = jax.random.split(key, 2 + 4 * LAYERS)
    normal = lambda i, *shape: 0.02 * jax.random.normal(keys[i], shape)
    params = {
        "wte": normal(0, VOCAB, WIDTH),
        "wpe": normal(1, LENGTH, WIDTH),
        "ln_f": jnp.ones(WIDTH),
    }
    for i in range(LAYERS):
        params[f"h{i}"] = {
            "ln_1": jnp.ones(WIDTH),
            "c_attn": normal(4 * i + 2, WIDTH, 3 * WIDTH),
            "c_attn_bias": jnp.zeros(3 * WIDTH),
            "c_proj": normal(4 * i + 3, WIDTH, WIDTH),
            "ln_2": jnp.ones(WIDTH),
            "c_fc": normal(4 * i + 4, WIDTH, 4 * WIDTH),
            "c_fc_proj": normal(4 * i + 5, 4 * WIDTH, WIDTH),
        }
    return params


def layer_norm(x, g):
    return g * (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p, x):
    B, T, C = x.shape
    q, k, v = jnp.split(x @ p["c_attn"] + p["c_attn_bias"], 3, axis=-1)
    q, k, v = (a.reshape(B, T, HEADS, C // HEADS).transpose(0, 2, 1, 3) for a in (q, k, v))
    att = (q @ k.transpose(0, 1, 3, 2)) / jnp.sqrt(C // HEADS)
    att = jnp.where(jnp.tril(jnp.ones((T, T))) == 0, float("-inf"), att)
    y = jax.nn.softmax(att, axis=-1) @ v
    return y.transpose(0, 2, 1, 3).reshape(B, T, C) @ p["c_proj"]


def gpt(params, idx):
    x = params["wte"][idx] + params["wpe"][: idx.shape[1]]
    for i in range(LAYERS):
        p = params[f"h{i}"]
        x = x + attention(p, layer_norm(x, p["ln_1"]))
        x = x + jax.nn.gelu(layer_norm(x, p["ln_2"]) @ p["c_fc"]) @ p["c_fc_proj"]
    return layer_norm(x, params["ln_f"]) @ params["wte"].T


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(gpt(params, x), y).mean()


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.95))


@jax.jit
def train_step(params, opt_state, xs, ys):
    def micro(total, xy):
        loss, grads = jax.value_and_grad(loss_fn)(params, *xy)
        return jax.tree.map(jnp.add, total, (loss, grads)), None

    zero = (0.0, jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(micro, zero, (xs, ys))
    loss, grads = jax.tree.map(lambda a: a / MICRO, (loss, grads))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params = init(jax.random.PRNGKey(1337))
opt_state = optimizer.init(params)
data = np.random.default_rng(0).integers(0, VOCAB, 200_000).astype(np.uint16)
for step in range(10):
    at = np.random.default_rng(step).integers(0, len(data) - LENGTH - 1, (MICRO, BATCH))
    xs = np.stack([[data[i : i + LENGTH] for i in row] for row in at]).astype(np.int32)
    ys = np.stack([[data[i + 1 : i + 1 + LENGTH] for i in row] for row in at]).astype(np.int32)
    params, opt_state, loss = train_step(params, opt_state, xs, ys)
print(float(loss))
