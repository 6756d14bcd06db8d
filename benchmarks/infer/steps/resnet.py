"""ResNet in Linen with batch statistics, warm-up and weight decay; images of integers."""

import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

LARGE = "large" in sys.argv
WIDTH, SIDE, CLASSES, BATCH = (128, 64, 1000, 64) if LARGE else (16, 16, 10, 16)


class ResNetBlock(nn.Module):
    filters: int
    strides: tuple

    @nn.compact
    def __call__(self, x, train):
        norm = lambda: nn.BatchNorm(use_running_average=not train, momentum=0.9)
        y = nn.Conv(self.filters, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = norm()(nn.Conv(self.filters, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.filters, (1, 1), self.strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(WIDTH, (3, 3), use_bias=False)(x)
        for stage in range(3):
            for block in range(2):
                strides = (2, 2) if stage and not block else (1, 1)
                x = ResNetBlock(WIDTH * 2**stage, strides)(x, train)
        return nn.Dense(CLASSES)(jnp.mean(x, axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


model = ResNet()
variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, SIDE, SIDE, 3)))
schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100)
state = TrainState.create(
    apply_fn=model.apply,
    params=variables["params"],
    batch_stats=variables["batch_stats"],
    tx=optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(schedule, 0.9, nesterov=True)),
)


@jax.jit
def train_step(state, batch):
    def loss_fn(params):
        images = batch["image"].astype(jnp.float32) / 255.0
        logits, new = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, images, mutable=["batch_stats"]
        )
        one_hot = jax.nn.one_hot(batch["label"], CLASSES)
        return optax.softmax_cross_entropy(logits, one_hot).mean(), (new, logits)

    (loss, (new, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
    return state, {"loss": loss, "accuracy": accuracy}


rng = np.random.default_rng(0)
for step in range(10):
    batch = {
        "image": rng.integers(0, 256, (BATCH, SIDE, SIDE, 3), dtype=np.uint8),
        "label": rng.integers(0, CLASSES, BATCH),
    }
    state, metrics = train_step(state, batch)
print(metrics)
