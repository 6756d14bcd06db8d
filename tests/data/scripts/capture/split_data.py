"""Data parallel over one axis: every device has all parameters, and asks the mesh for its size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("data",))
rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
optimizer = optax.adam(1e-2)


def init(key):
    up, down = jax.random.split(key)
    params = {
        "up": jax.random.normal(up, (32, 96)) * 0.1,
        "down": jax.random.normal(down, (96, 32)) * 0.1,
        "scale": jnp.ones(32),
    }
    return params, optimizer.init(params)


def loss_fn(params, batch):
    hidden = jax.nn.gelu(batch @ params["up"])
    hidden = jax.lax.with_sharding_constraint(hidden, rows)
    return jnp.mean((hidden @ params["down"] * params["scale"] - batch) ** 2)


def mean_over_data(values):
    return jax.lax.pmean(jnp.mean(values), "data")


@jax.jit
def train_step(params, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    norms = jnp.mean(batch**2, axis=1)
    mean = jax.shard_map(mean_over_data, mesh=mesh, in_specs=P("data"), out_specs=P())(norms)
    return optax.apply_updates(params, updates), state, loss, mean


params, state = jax.jit(init, out_shardings=whole)(jax.random.key(0))
rng = np.random.default_rng(0)
for step in range(6):
    batch = rng.random((16, 32), np.float32)
    assert len(batch) % mesh.shape["data"] == 0
    params, state, loss, _ = train_step(params, state, jax.device_put(batch, rows))
    print(f"step {step}: {float(loss):.4f}")
