"""Language model in Flax Linen with a TrainState and AdamW."""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

LARGE = "large" in sys.argv
VOCAB, WIDTH, LAYERS, HEADS, BATCH, LENGTH = (
    (32768, 2048, 8, 16, 8, 512) if LARGE else (1024, 128, 2, 4, 8, 64)
)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        x = x + nn.SelfAttention(num_heads=HEADS)(h, mask=mask)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(h)))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH)(tokens)
        x = x + nn.Embed(LENGTH, WIDTH)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x = Block()(x, mask)
        return nn.Dense(VOCAB, use_bias=False)(nn.LayerNorm()(x))


model = Transformer()
tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, VOCAB)


def init():
    params = model.init(jax.random.key(0), tokens)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss, "norm": optax.global_norm(grads)}


state = jax.jit(init)()
for step in range(10):
    batch = {"inputs": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
    state, metrics = train_step(state, batch)
print(float(metrics["loss"]))
