"""A fit in the style of optax's getting-started example, with a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("batch", "hidden"), axis_types=(AxisType.Auto, AxisType.Auto))
replicated = NamedSharding(mesh, P())


def initial_params():
    key = jax.random.key(0)
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (64, 128)) * 0.1,
        "output": jax.random.normal(second, (128, 1)) * 0.1,
    }


def net(x, params):
    x = jnp.dot(x, params["hidden"])
    x = jax.nn.relu(x)
    return jnp.dot(x, params["output"])


def loss(params, batch, labels):
    return jnp.mean(optax.l2_loss(net(batch, params), labels))


def fit(params, optimizer, data):
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch, labels):
        loss_value, grads = jax.value_and_grad(loss)(params, batch, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss_value

    for number, (batch, labels) in enumerate(data):
        params, opt_state, loss_value = step(params, opt_state, batch, labels)
        if number % 100 == 0:
            print(f"step {number}, loss: {loss_value}")
    return params


rows = NamedSharding(mesh, P("batch"))
columns = {"hidden": P(None, "hidden"), "output": P("hidden")}
params = {
    name: jax.device_put(value, NamedSharding(mesh, columns[name]))
    for name, value in initial_params().items()
}
rng = np.random.default_rng(0)
inputs = rng.integers(0, 2, (50, 32, 64)).astype(np.float32)
labels = inputs.sum(2, keepdims=True) % 2
data = [(jax.device_put(x, rows), jax.device_put(y, rows)) for x, y in zip(inputs, labels)]
fit(params, optax.adam(1e-2), data)
