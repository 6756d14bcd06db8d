"""Mixture of experts with capacities: dispatch and combine masks, an auxiliary loss."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
VOCAB, WIDTH, HIDDEN, EXPERTS, LAYERS, BATCH, LENGTH = (
    (8192, 1024, 4096, 16, 2, 8, 256) if LARGE else (512, 64, 128, 8, 2, 8, 32)
)
CAPACITY = 2 * LENGTH // EXPERTS


def init(key):
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))
    make = lambda *shape: 0.02 * jax.random.normal(next(keys), shape)
    layers = [
        {
            "router": make(WIDTH, EXPERTS),
            "wi": make(EXPERTS, WIDTH, HIDDEN),
            "wo": make(EXPERTS, HIDDEN, WIDTH),
            "scale": jnp.ones(WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {"embedding": make(VOCAB, WIDTH), "layers": layers}


def moe(layer, x):
    gates = jax.nn.softmax(x @ layer["router"])  # (batch, length, experts)
    chosen = jnp.argmax(gates, -1)
    mask = jax.nn.one_hot(chosen, EXPERTS)
    balance = EXPERTS * jnp.mean(jnp.mean(mask, 1) * jnp.mean(gates, 1))
    position = jnp.cumsum(mask, axis=1) * mask - 1
    dispatch = jax.nn.one_hot(position.max(-1), CAPACITY)[:, :, None, :] * mask[..., None]
    combine = dispatch * jnp.max(gates, -1)[..., None, None]
    inside = jnp.einsum("bsec,bsd->becd", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("becd,edf->becf", inside, layer["wi"]))
    outside = jnp.einsum("becf,efd->becd", hidden, layer["wo"])
    return jnp.einsum("bsec,becd->bsd", combine, outside), balance


def loss_fn(params, tokens):
    x = params["embedding"][tokens[:, :-1]]
    total = 0.0
    for layer in params["layers"]:
        normal = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * layer["scale"]
        y, balance = moe(layer, normal)
        x, total = x + y, total + 0.01 * balance
    logits = x @ params["embedding"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.mean(losses) + total


optimizer = optax.adam(1e-3)


@jax.jit
def train_step(params, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


params = jax.jit(init)(jax.random.key(0))
opt_state = optimizer.init(params)
for step in range(10):
    tokens = np.random.default_rng(step).integers(0, VOCAB, (BATCH, LENGTH + 1))
    params, opt_state, loss = train_step(params, opt_state, tokens)
print(float(loss))
