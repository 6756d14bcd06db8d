"""Makes its batch of the parts of processes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh(
    (jax.device_count() // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
)
GLOBAL = 64
assert GLOBAL % jax.process_count() == 0
local = GLOBAL // jax.process_count()
rng = np.random.default_rng(1000 + jax.process_index())
host = {
    "up": 0.05 * np.random.default_rng(0).standard_normal((128, 512), np.float32),
    "down": 0.05 * np.random.default_rng(1).standard_normal((512, 128), np.float32),
}
specs = {"up": P(None, "model"), "down": P("model", None)}
params = {
    k: jax.make_array_from_callback(v.shape, NamedSharding(mesh, specs[k]), lambda i, v=v: v[i])
    for k, v in host.items()
}


@jax.jit
def train_step(params, x):
    loss, g = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2))(
        params
    )
    return jax.tree.map(lambda w, d: w - 0.1 * d, params, g), loss


for step in range(10**6):
    x = jax.make_array_from_process_local_data(
        NamedSharding(mesh, P("data")), rng.standard_normal((local, 128), np.float32)
    )
    assert x.shape == (GLOBAL, 128), x.shape
    params, loss = train_step(params, x)
    if jax.process_index() == 0:
        print(step, loss, flush=True)
