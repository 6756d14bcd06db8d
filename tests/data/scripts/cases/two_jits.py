"""An iteration calls two jitted functions: gradients, then the update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh(
    (jax.device_count() // 2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
)
place = lambda a, *s: jax.device_put(a, NamedSharding(mesh, P(*s)))
k = jax.random.key(0)
params = {
    "up": place(0.05 * jax.random.normal(k, (128, 512)), None, "model"),
    "down": place(0.05 * jax.random.normal(k, (512, 128)), "model", None),
}
tx = optax.adam(1e-3)
opt = tx.init(params)


def loss_fn(p, x):
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - x) ** 2)


grad_fn = jax.jit(jax.value_and_grad(loss_fn))


@jax.jit
def apply_fn(params, opt, grads):
    updates, opt = tx.update(grads, opt, params)
    return optax.apply_updates(params, updates), opt


rng = np.random.default_rng(0)
for step in range(10**6):
    x = place(rng.standard_normal((512, 128), np.float32), "data")
    loss, grads = grad_fn(params, x)
    params, opt = apply_fn(params, opt, grads)
    print(step, loss, flush=True)
