"""NNX language model with top-2 experts in every layer, all of them computed for each token;
layers made by vmap and run by scan."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

LARGE = "large" in sys.argv
VOCAB, WIDTH, HIDDEN, EXPERTS, LAYERS, BATCH, LENGTH = (
    (8192, 1024, 2048, 8, 4, 8, 256) if LARGE else (256, 64, 128, 4, 2, 8, 16)
)


class Experts(nnx.Module):
    def __init__(self, rngs):
        make = nnx.initializers.lecun_normal()
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Param(make(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.down = nnx.Param(make(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x):
        h = self.norm(x)
        scores, which = jax.lax.top_k(self.router(h), 2)
        weights = jax.nn.softmax(scores, -1)
        gates = jnp.sum(jax.nn.one_hot(which, EXPERTS) * weights[..., None], -2)
        inside = nnx.silu(jnp.einsum("btd,edf->ebtf", h, self.up[...]))
        outside = jnp.einsum("ebtf,efd->ebtd", inside, self.down[...])
        return x + jnp.einsum("ebtd,bte->btd", outside, gates)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs):
            return Experts(rngs)

        self.layers = layers(rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return layer(x)

        return self.head(run(self.embed(tokens), self.layers))


model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    def loss_fn(model):
        logits = model(batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean(), logits

    (loss, _), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss)
    optimizer.update(model, grads)


for step in range(10):
    batch = np.random.default_rng(step).integers(0, VOCAB, (BATCH, LENGTH + 1))
    train_step(model, optimizer, metrics, batch)
print(metrics.compute())
