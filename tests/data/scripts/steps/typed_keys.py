"""New-style random keys as part of the state, one of them per row."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def step(state, x):
    w, key, rows = state
    key, now = jax.random.split(key)
    keep = jax.random.bernoulli(now, 0.9, x.shape)
    noise = jax.vmap(lambda k: jax.random.normal(k, (32,)))(rows)

    def loss_of(w):
        return jnp.mean(((x * keep) @ w + 0.01 * noise) ** 2)

    loss, grad = jax.value_and_grad(loss_of)(w)
    return (w - 0.1 * grad, key, jax.vmap(lambda k: jax.random.fold_in(k, 1))(rows)), loss


def build(mesh):
    def struct(shape, *spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    keys = jax.random.key(0).dtype
    state = struct((16, 32), None, "tp"), struct((), dtype=keys), struct((8,), "dp", dtype=keys)
    return jax.jit(step, donate_argnums=0), (state, struct((8, 16), "dp"))
