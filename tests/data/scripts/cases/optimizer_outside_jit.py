"""Loss and gradients are jitted; the update is made outside. It has no mesh."""

import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.RandomState(0)
params = {
    k: jnp.asarray(rng.randn(*s).astype(np.float32) * 0.1)
    for k, s in (("up", (64, 512)), ("down", (512, 64)))
}
moments = jax.tree.map(jnp.zeros_like, params)


@jax.jit
def loss_and_grads(params, x):
    return jax.value_and_grad(lambda p: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"] - x) ** 2))(
        params
    )


for i in range(60):
    loss, grads = loss_and_grads(params, np.random.RandomState(i).randn(64, 64).astype(np.float32))
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, params, moments)
print(float(loss))
