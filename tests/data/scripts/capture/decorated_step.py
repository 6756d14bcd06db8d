"""A step under a decorator with arguments, explicit axis types, a mesh in force."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import jit, make_mesh, set_mesh
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

mesh = make_mesh((jax.device_count() // 2, 2), ("dp", "tp"), (jax.sharding.AxisType.Explicit,) * 2)


@partial(jit, donate_argnames=("params",))
def train_step(params, batch, *, rate):
    def loss(params):
        hidden = jnp.tanh(jnp.einsum("bd,dh->bh", batch, params["up"], out_sharding=P("dp", "tp")))
        out = jnp.einsum("bh,hd->bd", hidden, params["down"], out_sharding=P("dp", None))
        return jnp.mean((out - batch) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, grads), value


with set_mesh(mesh):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": reshard(jax.random.normal(keys[0], (32, 64)) * 0.1, P(None, "tp")),
        "down": reshard(jax.random.normal(keys[1], (64, 32)) * 0.1, P("tp", None)),
    }
    batch = reshard(jax.random.normal(keys[2], (16, 32)), P("dp", None))
    for _ in range(10):
        params, value = train_step(params, batch, rate=0.1)
    print("loss", value)
