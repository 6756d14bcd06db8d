"""Character model with two LSTM layers in Haiku, unrolled over time first."""

import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
VOCAB, WIDTH, LENGTH, BATCH = (256, 2048, 128, 64) if LARGE else (128, 64, 16, 16)


def network():
    return hk.DeepRNN(
        [
            lambda x: jax.nn.one_hot(x, VOCAB),
            hk.LSTM(WIDTH),
            jax.nn.relu,
            hk.LSTM(WIDTH),
            hk.nets.MLP([WIDTH, VOCAB]),
        ]
    )


def unroll(inputs):
    core = network()
    logits, _ = hk.dynamic_unroll(core, inputs, core.initial_state(inputs.shape[1]))
    return logits


init, apply = hk.without_apply_rng(hk.transform(unroll))
optimizer = optax.adam(1e-3)


def loss_fn(params, batch):
    logits = apply(params, batch["input"])
    log_probs = jax.nn.log_softmax(logits)
    one_hot = jax.nn.one_hot(batch["target"], VOCAB)
    return -jnp.sum(one_hot * log_probs) / batch["input"].size


@jax.jit
def update(state, batch):
    params, opt_state = state
    grads = jax.grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state


rng = np.random.default_rng(0)
params = init(jax.random.PRNGKey(0), np.zeros((LENGTH, BATCH), int))
state = (params, optimizer.init(params))
for step in range(10):
    text = rng.integers(0, VOCAB, (LENGTH + 1, BATCH))
    state = update(state, {"input": text[:-1], "target": text[1:]})
print(float(jnp.sum(jax.tree.leaves(state[0])[0])))
