"""A decoder like Llama 3 for one device: layers in a scan, rotary positions, grouped heads, AdamW.

python infer_llama.py --width 4096 --layers 32 --heads 32 --groups 8 --mlp 14336 --vocab 128256
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--groups", type=int, default=2)
parser.add_argument("--mlp", type=int, default=224)
parser.add_argument("--vocab", type=int, default=512)
parser.add_argument("--length", type=int, default=32)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=2)
args = parser.parse_args()
head = args.width // args.heads
optimizer = optax.adamw(3e-4, weight_decay=0.1)


@jax.jit
def init(key):
    def normal(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5

    keys = iter(jax.random.split(key, 9))
    layers, width = args.layers, args.width
    params = {
        "embed": normal(next(keys), args.vocab, width),
        "layers": {
            "q": normal(next(keys), layers, width, args.heads * head),
            "k": normal(next(keys), layers, width, args.groups * head),
            "v": normal(next(keys), layers, width, args.groups * head),
            "o": normal(next(keys), layers, args.heads * head, width),
            "gate": normal(next(keys), layers, width, args.mlp),
            "up": normal(next(keys), layers, width, args.mlp),
            "down": normal(next(keys), layers, args.mlp, width),
            "norm_attention": jnp.ones((layers, width), jnp.bfloat16),
            "norm_mlp": jnp.ones((layers, width), jnp.bfloat16),
        },
        "norm": jnp.ones((width,), jnp.bfloat16),
        "head": normal(next(keys), width, args.vocab),
    }
    return params, optimizer.init(params)


def norm(x, scale):
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-5)
    return x32.astype(x.dtype) * scale


def rotated(x):
    """Rotary positions of (batch, length, heads, head)."""
    half = x.shape[-1] // 2
    frequencies = 500_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None].astype(x.dtype), jnp.sin(angles)[:, None].astype(x.dtype)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(x, layer):
    batch, length, _ = x.shape
    q = rotated((x @ layer["q"]).reshape(batch, length, args.heads, head))
    k = rotated((x @ layer["k"]).reshape(batch, length, args.groups, head))
    v = (x @ layer["v"]).reshape(batch, length, args.groups, head)
    q = q.reshape(batch, length, args.groups, args.heads // args.groups, head)
    scores = jnp.einsum("btghd,bsgd->bghts", q, k).astype(jnp.float32) * head**-0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30)).astype(x.dtype)
    mixed = jnp.einsum("bghts,bsgd->btghd", weights, v)
    return mixed.reshape(batch, length, args.heads * head) @ layer["o"]


def mlp(x, layer):
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def loss_of(params, tokens):
    @jax.checkpoint
    def block(x, layer):
        x = x + attention(norm(x, layer["norm_attention"]), layer)
        return x + mlp(norm(x, layer["norm_mlp"]), layer), None

    x, _ = jax.lax.scan(block, params["embed"][tokens[:, :-1]], params["layers"])
    logits = (norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, state, tokens):
    loss, grads = jax.value_and_grad(loss_of)(params, tokens)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


params, state = init(jax.random.key(0))
for step in range(args.steps):
    key = jax.random.fold_in(jax.random.key(1), step)
    tokens = jax.random.randint(key, (args.batch, args.length + 1), 0, args.vocab)
    params, state, loss = train_step(params, state, tokens)
print(float(loss))
