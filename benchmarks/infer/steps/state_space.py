"""Diagonal state space model (S5, Mamba): an associative scan over the sequence, a short
convolution, gates; stacked layers."""

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
VOCAB, WIDTH, INNER, STATE, LAYERS, BATCH, LENGTH = (
    (16384, 1024, 2048, 16, 4, 8, 256) if LARGE else (256, 64, 128, 4, 2, 8, 32)
)


class Layer(NamedTuple):
    norm: jax.Array
    in_proj: jax.Array
    conv: jax.Array
    x_proj: jax.Array
    dt_proj: jax.Array
    dt_bias: jax.Array
    a_log: jax.Array
    d: jax.Array
    out_proj: jax.Array


class Model(NamedTuple):
    embedding: jax.Array
    layers: list
    norm: jax.Array


RANK = WIDTH // 16


def make_layer(key):
    k = jax.random.split(key, 5)
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[0] ** 0.5
    return Layer(
        norm=jnp.ones(WIDTH),
        in_proj=normal(k[0], WIDTH, 2 * INNER),
        conv=normal(k[1], 4, INNER),
        x_proj=normal(k[2], INNER, RANK + 2 * STATE),
        dt_proj=normal(k[3], RANK, INNER),
        dt_bias=jnp.full(INNER, -4.0),
        a_log=jnp.log(jnp.tile(jnp.arange(1.0, STATE + 1), (INNER, 1))),
        d=jnp.ones(INNER),
        out_proj=normal(k[4], INNER, WIDTH),
    )


def mix(w, x):
    u, gate = jnp.split(x @ w.in_proj, 2, axis=-1)
    padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
    u = jax.nn.silu(sum(padded[:, i : i + u.shape[1]] * w.conv[i] for i in range(4)))
    dt, b, c = jnp.split(u @ w.x_proj, [RANK, RANK + STATE], axis=-1)
    dt = jax.nn.softplus(dt @ w.dt_proj + w.dt_bias)
    decay = jnp.exp(dt[..., None] * -jnp.exp(w.a_log))
    drive = (dt * u)[..., None] * b[:, :, None, :]
    combine = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])
    _, states = jax.lax.associative_scan(combine, (decay, drive), axis=1)
    y = jnp.einsum("blds,bls->bld", states, c) + w.d * u
    return (y * jax.nn.silu(gate)) @ w.out_proj


def rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def loss_fn(model, tokens):
    x = model.embedding[tokens[:, :-1]]
    for w in model.layers:
        x = x + mix(w, rms(x, w.norm))
    logits = rms(x, model.norm) @ model.embedding.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


key = jax.random.key(0)
model = Model(
    embedding=0.02 * jax.random.normal(key, (VOCAB, WIDTH)),
    layers=[make_layer(k) for k in jax.random.split(key, LAYERS)],
    norm=jnp.ones(WIDTH),
)
tx = optax.lion(1e-4)
opt_state = tx.init(model)


@jax.jit
def step(model, opt_state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(model, tokens)
    updates, opt_state = tx.update(grads, opt_state, model)
    return optax.apply_updates(model, updates), opt_state, loss


for i in range(10):
    tokens = np.random.default_rng(i).integers(0, VOCAB, (BATCH, LENGTH + 1))
    model, opt_state, loss = step(model, opt_state, tokens)
print(float(loss))
