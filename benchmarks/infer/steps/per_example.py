"""Differential privacy: gradients of each example by vmap, clipped over all parameters."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
PIXELS, WIDTH, CLASSES, BATCH = (3072, 1024, 10, 128) if LARGE else (784, 128, 10, 32)


def predict(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(w @ x + b)
    w, b = params[-1]
    return w @ x + b


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y)


@jax.jit
def private_step(params, opt_state, xs, ys, key):
    losses, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0, 0))(params, xs, ys)
    norms = jax.vmap(optax.global_norm)(grads)
    scale = jnp.minimum(1.0, 1.0 / (norms + 1e-6))
    clipped = jax.tree.map(lambda g: jnp.tensordot(scale, g, 1) / xs.shape[0], grads)
    leaves, tree = jax.tree.flatten(clipped)
    keys = jax.random.split(key, len(leaves))
    noisy = [g + 0.01 * jax.random.normal(k, g.shape) for g, k in zip(leaves, keys)]
    updates, opt_state = optimizer.update(jax.tree.unflatten(tree, noisy), opt_state)
    return optax.apply_updates(params, updates), opt_state, losses.mean()


sizes = [PIXELS, WIDTH, WIDTH, CLASSES]
params = [
    (jax.random.normal(jax.random.key(n), (b, a)) * a**-0.5, jnp.zeros(b))
    for n, (a, b) in enumerate(zip(sizes[:-1], sizes[1:]))
]
optimizer = optax.sgd(0.1, momentum=0.9)
opt_state = optimizer.init(params)
for step in range(10):
    rng = np.random.default_rng(step)
    xs = rng.normal(size=(BATCH, PIXELS)).astype(np.float32)
    ys = rng.integers(0, CLASSES, BATCH)
    params, opt_state, value = private_step(params, opt_state, xs, ys, jax.random.key(step))
print(float(value))
