"""Evaluation, with more work and called more often, comes before the training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh(
    (jax.device_count() // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
)
at = lambda *s: NamedSharding(mesh, P(*s))
specs = {"up": at(None, "model"), "down": at("model", None)}
tx = optax.adam(1e-3)


def init(key):
    a, b = jax.random.split(key)
    return {
        "up": 0.05 * jax.random.normal(a, (128, 512)),
        "down": 0.05 * jax.random.normal(b, (512, 128)),
    }


def loss_fn(p, x):
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)


@jax.jit
def eval_step(params, total, x):
    return total + loss_fn(params, x)


@jax.jit
def train_step(params, opt, x):
    loss, g = jax.value_and_grad(loss_fn)(params, x)
    updates, opt = tx.update(g, opt, params)
    return optax.apply_updates(params, updates), opt, loss


params = jax.jit(init, out_shardings=specs)(jax.random.key(0))
opt = jax.jit(tx.init)(params)
rng = np.random.default_rng(0)


def evaluate():
    total = jnp.zeros(())
    for _ in range(20):
        total = eval_step(
            params, total, jax.device_put(rng.standard_normal((8192, 128), np.float32), at("data"))
        )
    print("eval", float(total) / 20, flush=True)


evaluate()
for step in range(10**6):
    params, opt, loss = train_step(
        params, opt, jax.device_put(rng.standard_normal((64, 128), np.float32), at("data"))
    )
    print(step, loss, flush=True)
    if step % 50 == 49:
        evaluate()
