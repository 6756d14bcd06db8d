"""Vision transformer in Flax NNX, with nnx.jit and dropout."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

LARGE = "large" in sys.argv
SIDE, PATCH, WIDTH, LAYERS, HEADS, BATCH, CLASSES = (
    (224, 16, 1280, 12, 16, 32, 1000) if LARGE else (32, 8, 64, 2, 4, 16, 10)
)


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.linear1 = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        h = self.dropout(nnx.gelu(self.linear1(self.norm2(x))))
        return x + self.linear2(h)


class VisionTransformer(nnx.Module):
    def __init__(self, *, rngs):
        self.patches = nnx.Conv(3, WIDTH, (PATCH, PATCH), strides=(PATCH, PATCH), rngs=rngs)
        count = (SIDE // PATCH) ** 2
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, count + 1, WIDTH)))
        self.cls = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images):
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, WIDTH)
        cls = jnp.broadcast_to(self.cls[...], (x.shape[0], 1, WIDTH))
        x = jnp.concatenate([cls, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


model = VisionTransformer(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-3, weight_decay=0.05), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, images, labels):
    def loss_fn(model):
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


rng = np.random.default_rng(0)
for step in range(10):
    images = rng.normal(size=(BATCH, SIDE, SIDE, 3)).astype(np.float32)
    labels = rng.integers(0, CLASSES, BATCH)
    loss = train_step(model, optimizer, images, labels)
print(float(loss))
