"""DLRM: 26 tables of embeddings, a bottom and a top network, pairwise products; Adagrad."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

LARGE = "large" in sys.argv
TABLES, ROWS, WIDTH, DENSE, BATCH = (8, 524288, 128, 13, 8192) if LARGE else (4, 1024, 32, 13, 64)


def dense_layers(key, sizes):
    return [
        {"w": jax.random.normal(k, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros((b,))}
        for k, a, b in zip(jax.random.split(key, len(sizes)), sizes[:-1], sizes[1:])
    ]


def make(key):
    keys = jax.random.split(key, TABLES + 2)
    pairs = (TABLES + 1) * TABLES // 2
    return {
        "tables": [0.01 * jax.random.normal(k, (ROWS, WIDTH)) for k in keys[2:]],
        "bottom": dense_layers(keys[0], [DENSE, 512, 256, WIDTH]),
        "top": dense_layers(keys[1], [pairs + WIDTH, 1024, 512, 1]),
    }


def forward(layers, x, last):
    for n, layer in enumerate(layers):
        x = x @ layer["w"] + layer["b"]
        x = jax.nn.relu(x) if n < len(layers) - 1 or last else x
    return x


def loss_fn(params, dense, sparse, clicks):
    bottom = forward(params["bottom"], dense, True)
    found = [jnp.take(table, sparse[:, i], axis=0) for i, table in enumerate(params["tables"])]
    features = jnp.stack([bottom, *found], axis=1)
    products = jnp.einsum("bid,bjd->bij", features, features)
    rows, columns = np.tril_indices(TABLES + 1, -1)
    top = jnp.concatenate([bottom, products[:, rows, columns]], axis=-1)
    logits = forward(params["top"], top, False)[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, clicks).mean()


optimizer = optax.adagrad(0.01)


@jax.jit
def update(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


params = jax.jit(make)(jax.random.key(0))
opt_state = optimizer.init(params)
for step in range(10):
    rng = np.random.default_rng(step)
    batch = (
        rng.normal(size=(BATCH, DENSE)).astype(np.float32),
        rng.integers(0, ROWS, (BATCH, TABLES)),
        rng.integers(0, 2, BATCH).astype(np.float32),
    )
    params, opt_state, loss = update(params, opt_state, batch)
print(float(loss))
