"""A classifier in the style of flax's `examples/mnist`: Linen, a TrainState, one jitted step."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class CNN(nn.Module):
    """Small enough to compile in a second."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(features=8, kernel_size=(3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(features=64)(x))
        return nn.Dense(features=16)(x)


@jax.jit
def train_step(state, images, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, images)
        one_hot = jax.nn.one_hot(labels, 16)
        return jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot)), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
    return state.apply_gradients(grads=grads), loss, accuracy


def create_train_state(rng, learning_rate, momentum):
    cnn = CNN()
    params = cnn.init(rng, jnp.ones([1, 14, 14, 1]))["params"]
    return train_state.TrainState.create(
        apply_fn=cnn.apply, params=params, tx=optax.sgd(learning_rate, momentum)
    )


def shard(mesh, array):
    columns = P(None, "model") if array.ndim == 2 else P()
    return jax.device_put(array, NamedSharding(mesh, columns))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()

    devices = mesh_utils.create_device_mesh((jax.device_count(), 1))
    mesh = Mesh(devices, ("data", "model"))
    rng = np.random.default_rng(0)
    images = rng.random((4 * args.batch_size, 14, 14, 1), np.float32)
    labels = rng.integers(0, 10, 4 * args.batch_size)

    state = create_train_state(jax.random.key(0), 0.1, 0.9)
    state = jax.tree.map(lambda leaf: shard(mesh, leaf) if hasattr(leaf, "ndim") else leaf, state)
    rows = NamedSharding(mesh, P("data"))
    for epoch in range(args.epochs):
        losses = []
        for start in range(0, len(images), args.batch_size):
            batch = slice(start, start + args.batch_size)
            state, loss, _ = train_step(
                state,
                jax.device_put(images[batch], rows),
                jax.device_put(labels[batch], rows),
            )
            losses.append(float(loss))
        print(f"epoch {epoch}: loss {np.mean(losses):.4f}")


if __name__ == "__main__":
    main()
