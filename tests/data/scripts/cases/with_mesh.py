"""`with mesh:`, `pjit`, and specs without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.pjit import pjit
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as PS

mesh = Mesh(mesh_utils.create_device_mesh((1, jax.device_count() // 2, 2)), ("dp", "fsdp", "mp"))
specs = {"up": PS("fsdp", "mp"), "down": PS("mp", "fsdp")}


def init(key):
    a, b = jax.random.split(key)
    return {
        "up": 0.05 * jax.random.normal(a, (128, 512)),
        "down": 0.05 * jax.random.normal(b, (512, 128)),
    }


def train_step(params, rng, x):
    x = with_sharding_constraint(x, PS(("dp", "fsdp")))
    rng, _ = jax.random.split(rng)

    def loss_fn(p):
        h = with_sharding_constraint(jax.nn.silu(x @ p["up"]), PS(("dp", "fsdp"), "mp"))
        return jnp.mean((h @ p["down"] - x) ** 2)

    loss, g = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda w, d: w - 0.1 * d, params, g), rng, dict(loss=loss)


sharded_init = pjit(init, in_shardings=PS(), out_shardings=specs)
sharded_step = pjit(
    train_step,
    in_shardings=(specs, PS(), PS()),
    out_shardings=(specs, PS(), PS()),
    donate_argnums=(0, 1),
)
data = np.random.default_rng(0)
with mesh:
    params, rng = sharded_init(jax.random.PRNGKey(0)), jax.random.PRNGKey(1)
    for step in range(10**6):
        params, rng, metrics = sharded_step(
            params, rng, data.standard_normal((64, 128), np.float32)
        )
        print(step, jax.device_get(metrics)["loss"], flush=True)
