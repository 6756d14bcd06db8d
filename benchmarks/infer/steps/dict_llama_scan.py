"""Llama in plain dicts: layers stacked and scanned, grouped queries, rotary, remat, bfloat16."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

LARGE = "large" in sys.argv
V, D, F, L, H, K, DH, B, T = (
    (32000, 2048, 5632, 8, 16, 4, 128, 8, 1024) if LARGE else (512, 64, 192, 2, 4, 2, 16, 8, 32)
)
rng = np.random.default_rng(0)


def weight(*shape, scale=0.02):
    return jnp.asarray(rng.normal(0, scale, shape).astype(np.float32))


params = {
    "embed": weight(V, D),
    "layers": {
        "wq": weight(L, D, H, DH),
        "wk": weight(L, D, K, DH),
        "wv": weight(L, D, K, DH),
        "wo": weight(L, H, DH, D),
        "w_gate": weight(L, D, F),
        "w_up": weight(L, D, F),
        "w_down": weight(L, F, D),
        "norm1": jnp.ones((L, D)),
        "norm2": jnp.ones((L, D)),
    },
    "norm": jnp.ones((D,)),
    "lm_head": weight(D, V),
}


def rms_norm(x, scale):
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + 1e-5)
    return (x32 * scale).astype(x.dtype)


def rotary(x):
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * jnp.exp(-jnp.arange(half) / half * 9.2)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def layer(x, w):
    w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
    h = rms_norm(x, w["norm1"])
    q = rotary(jnp.einsum("btd,dhk->bthk", h, w["wq"]))
    k = rotary(jnp.einsum("btd,dhk->bthk", h, w["wk"]))
    v = jnp.einsum("btd,dhk->bthk", h, w["wv"])
    q = q.reshape(*q.shape[:2], K, H // K, DH)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / DH**0.5
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores.astype(jnp.float32), -1e30))
    out = jnp.einsum("bkgts,bskd->btkgd", weights.astype(x.dtype), v)
    x = x + jnp.einsum("bthk,hkd->btd", out.reshape(*x.shape[:2], H, DH), w["wo"])
    h = rms_norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"], None


def loss_fn(params, tokens):
    x = params["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (rms_norm(x, params["norm"]) @ params["lm_head"].astype(x.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def adamw(params, grads, mu, nu, step):
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, nu, grads)

    def move(p, m, v):
        m, v = m / (1 - 0.9**step), v / (1 - 0.95**step)
        return p - 3e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)

    return jax.tree.map(move, params, mu, nu), mu, nu


@partial(jax.jit, donate_argnums=(0,))
def train_step(state, tokens):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], tokens)
    step = state["step"] + 1
    params, mu, nu = adamw(state["params"], grads, state["mu"], state["nu"], step)
    return {"params": params, "mu": mu, "nu": nu, "step": step}, loss


zeros = partial(jax.tree.map, jnp.zeros_like)
state = {"params": params, "mu": zeros(params), "nu": zeros(params), "step": jnp.array(0)}
del params
for step in range(10):
    state, loss = train_step(state, rng.integers(0, V, (B, T + 1)))
print(float(loss))
