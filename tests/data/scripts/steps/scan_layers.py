"""Layers run by `lax.scan` over stacked parameters, with a remat policy as a knob of type str."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def build(mesh, remat="none"):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], jnp.mean(x)

    def loss_of(w, x):
        policy = POLICIES[remat]
        body = layer if policy is None else jax.checkpoint(layer, policy=policy)
        x, means = jax.lax.scan(body, x, w)
        return jnp.mean(x**2) + means.sum()

    def step(w, x):
        loss, grads = jax.value_and_grad(loss_of)(w, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    w = {"up": struct((3, 16, 32), None, None, "tp"), "down": struct((3, 32, 16), None, "tp")}
    return jax.jit(step, donate_argnums=0), (w, struct((8, 16), "dp"))
