"""`nnx.jit` gives the model back: sampling looks like a step, and comes first."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("rows",))
model = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


@nnx.jit
def sample(model, prompt):
    return jnp.argmax(model(prompt), axis=-1)


@nnx.jit
def train_step(model, optimizer, rows):
    value, slopes = nnx.value_and_grad(lambda net: jnp.mean((net(rows) - rows) ** 2))(model)
    optimizer.update(model, slopes)
    return value


for _ in range(20):
    print(int(sample(model, jnp.ones((1, 128)))[0]), end=" ", flush=True)
rng = np.random.default_rng(0)
for _ in range(8):
    rows = rng.normal(size=(64, 128)).astype(np.float32)
    value = train_step(model, optimizer, jax.device_put(rows, NamedSharding(mesh, P("rows"))))
print("loss", float(value))
