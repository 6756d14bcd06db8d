"""Encoder-decoder for translation in Haiku, with masks and shared embeddings."""

import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
VOCAB, WIDTH, LAYERS, HEADS, BATCH, SOURCE, TARGET = (
    (32000, 1024, 6, 16, 16, 256, 128) if LARGE else (512, 64, 2, 4, 8, 32, 16)
)


def attend(q, kv, mask, name):
    attention = hk.MultiHeadAttention(
        HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling(1.0), name=name
    )
    return attention(q, kv, kv, mask=mask)


def norm(x):
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


def dense(x):
    return hk.Linear(WIDTH)(jax.nn.relu(hk.Linear(4 * WIDTH)(x)))


def forward(source, target):
    embed = hk.Embed(VOCAB, WIDTH, name="embed")
    source_mask = (source > 0)[:, None, None, :]
    causal = jnp.tril(jnp.ones((target.shape[1], target.shape[1])))[None, None]
    x = embed(source) + hk.get_parameter(
        "positions", [SOURCE, WIDTH], init=hk.initializers.RandomNormal(0.02)
    )
    for layer in range(LAYERS):
        h = norm(x)
        x = x + attend(h, h, source_mask, f"encoder_self_{layer}")
        x = x + dense(norm(x))
    memory = norm(x)
    y = embed(target) + hk.get_parameter(
        "target_positions", [TARGET, WIDTH], init=hk.initializers.RandomNormal(0.02)
    )
    for layer in range(LAYERS):
        h = norm(y)
        y = y + attend(h, h, causal, f"decoder_self_{layer}")
        y = y + attend(norm(y), memory, source_mask, f"decoder_cross_{layer}")
        y = y + dense(norm(y))
    return norm(y) @ embed.embeddings.T


model = hk.without_apply_rng(hk.transform(forward))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def loss_fn(params, source, target):
    logits = model.apply(params, source, target[:, :-1])
    labels = target[:, 1:]
    weights = (labels > 0).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(losses * weights) / jnp.sum(weights)


@jax.jit
def update(params, opt_state, source, target):
    loss, grads = jax.value_and_grad(loss_fn)(params, source, target)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


rng = np.random.default_rng(0)
params = model.init(jax.random.PRNGKey(0), jnp.ones((2, SOURCE), int), jnp.ones((2, TARGET), int))
opt_state = optimizer.init(params)
for step in range(10):
    source = rng.integers(0, VOCAB, (BATCH, SOURCE))
    target = rng.integers(0, VOCAB, (BATCH, TARGET + 1))
    params, opt_state, loss = update(params, opt_state, source, target)
print(float(loss))
