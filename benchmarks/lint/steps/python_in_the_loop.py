"""Every layer of a scan calls Python.

finding: host-callback
mesh: dp:-1
line: 22
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    def layer(h, w):
        h = jnp.tanh(h @ w)
        if broken:
            jax.debug.callback(lambda *_: None, jnp.linalg.norm(h))
        return h, jnp.linalg.norm(h)

    def step(ws, x):
        def loss(ws):
            h, norms = jax.lax.scan(layer, x, ws)
            return jnp.mean(h**2), norms

        (value, norms), gradients = jax.value_and_grad(loss, has_aux=True)(ws)
        return ws - 0.1 * gradients, value, norms

    ws, x = struct(mesh, (8, 256, 256)), struct(mesh, (512, 256), "dp")
    return jax.jit(step, donate_argnums=0), (ws, x)


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
