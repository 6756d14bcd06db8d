"""A step that is compiled ahead of time and then called."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(jax.devices(), ("data",))
mesh = Mesh(mesh.devices.reshape(2, -1), ("data", "model"))


def train_step(config, weights, batch):
    def loss(weights):
        return jnp.mean(jnp.square(jax.nn.relu(batch @ weights["in"]) @ weights["out"] - batch))

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - config[0] * g, weights, grads), value


def place(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


keys = jax.random.split(jax.random.key(0), 3)
weights = {
    "in": place(jax.random.normal(keys[0], (32, 128)), None, "model"),
    "out": place(jax.random.normal(keys[1], (128, 32)), "model", None),
}
batch = place(jax.random.normal(keys[2], (16, 32)), "data", None)
step = jax.jit(train_step, static_argnums=0, donate_argnums=1)
compiled = step.lower((0.01,), weights, batch).compile()
print(compiled.memory_analysis().temp_size_in_bytes, "bytes of temporaries")
for _ in range(6):
    weights, value = compiled(weights, batch)
print(value)
