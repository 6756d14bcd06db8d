"""One call makes many steps of an optimizer, by a scan."""

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


@jax.jit
def train_epoch(params, xs):
    def body(params, x):
        loss, g = jax.value_and_grad(
            lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)
        )(params)
        return jax.tree.map(lambda w, d: w - 0.1 * d, params, g), loss

    return jax.lax.scan(body, params, xs)


for epoch in range(10**6):
    xs = place(rng.standard_normal((16, 64, 128), np.float32), None, "data")
    params, losses = train_epoch(params, xs)
    print(epoch, losses.mean(), losses[-1], flush=True)
