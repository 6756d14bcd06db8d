"""Asks for virtual CPU devices by jax's setting."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
weights = jax.device_put(jnp.ones((256, 256)) / 256, NamedSharding(mesh, P()))


@jax.jit
def step(weights, rows):
    loss = lambda w: jnp.mean((rows @ w - rows) ** 2)
    value, slope = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * slope, value


rng = np.random.default_rng(0)
for _ in range(8):
    rows = rng.normal(size=(128, 256)).astype(np.float32)
    weights, value = step(weights, jax.device_put(rows, NamedSharding(mesh, P("rows"))))
print("loss", float(value))
