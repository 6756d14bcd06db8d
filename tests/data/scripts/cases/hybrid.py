"""A hybrid mesh, laid out by processes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

hosts, local = jax.process_count(), jax.local_device_count()
ici, dcn = (1, local // 2, 2), (hosts, 1, 1)
mesh = Mesh(
    mesh_utils.create_hybrid_device_mesh(ici, dcn, process_is_granule=True),
    ("data", "fsdp", "model"),
)
place = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))
rng = np.random.default_rng(0)
params = {
    "up": place(0.05 * rng.standard_normal((128, 512), np.float32), "fsdp", "model"),
    "down": place(0.05 * rng.standard_normal((512, 128), np.float32), "model", "fsdp"),
}


@jax.jit
def train_step(params, x):
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(("data", "fsdp"))))
    loss, g = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2))(
        params
    )
    return jax.tree.map(lambda w, d: w - 0.1 * d, params, g), loss


for step in range(10**6):
    params, loss = train_step(
        params, place(rng.standard_normal((64, 128), np.float32), ("data", "fsdp"))
    )
    print(step, loss, flush=True)
