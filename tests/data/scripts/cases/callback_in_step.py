"""The step calls Python: it prints by `jax.debug.callback` and `jax.debug.print`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh(
    (jax.device_count() // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
)
place = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))
rng = np.random.default_rng(0)
params = {
    "up": place(0.05 * rng.standard_normal((128, 512), np.float32), None, "model"),
    "down": place(0.05 * rng.standard_normal((512, 128), np.float32), "model", None),
}


def log(i, loss):
    if i % 10 == 0:
        print(f"step {i} loss {loss:.5f}", flush=True)


@jax.jit
def train_step(params, i, x):
    loss, g = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2))(
        params
    )
    jax.debug.callback(log, i, loss)
    jax.lax.cond(
        i % 100 == 0,
        lambda: jax.debug.print("norm {}", jnp.linalg.norm(params["up"])),
        lambda: None,
    )
    return jax.tree.map(lambda w, d: w - 0.1 * d, params, g), i + 1, loss


i = jnp.int32(0)
while True:
    params, i, loss = train_step(
        params, i, place(rng.standard_normal((64, 128), np.float32), "data")
    )
