"""A Trainer whose step is a method that is jitted with itself as a static argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Trainer:
    """Owns the mesh and the state."""

    def __init__(self, width, rate):
        self.width, self.rate = width, rate
        devices = np.array(jax.devices()).reshape(2, -1)
        self.mesh = Mesh(devices, ("replica", "shard"))
        self.state = jax.jit(self.initial_state, out_shardings=self.sharding(P("shard")))()
        self.evaluate = jax.jit(self._evaluate)

    def sharding(self, spec):
        return NamedSharding(self.mesh, spec)

    def initial_state(self):
        weights = jax.random.normal(jax.random.key(1), (self.width, self.width)) / self.width
        return {"weights": weights, "momentum": jnp.zeros_like(weights)}

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def train_step(self, state, x, y):
        def loss(weights):
            return jnp.mean((jnp.tanh(x @ weights) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(state["weights"])
        momentum = 0.9 * state["momentum"] + grads
        weights = state["weights"] - self.rate * momentum
        return {"weights": weights, "momentum": momentum}, value

    def _evaluate(self, weights, x):
        return jnp.mean(jnp.tanh(x @ weights))

    def fit(self, steps):
        rng = np.random.default_rng(3)
        rows = self.sharding(P(("replica", "shard")))
        for _ in range(steps):
            x, y = (jax.device_put(rng.random((16, self.width), np.float32), rows) for _ in "xy")
            self.state, value = self.train_step(self.state, x, y)
            self.evaluate(self.state["weights"], x)
        return float(value)


if __name__ == "__main__":
    print(Trainer(64, 0.1).fit(8))
