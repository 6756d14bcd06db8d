"""Twenty layers, each with its own copy in the program.

finding: unrolled-layers
mesh: dp:-1
line: 23
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


LAYERS = 20


def make(mesh, broken):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    def step(ws, x):
        def loss(ws):
            h = x
            if broken:
                for w in ws:
                    h, _ = layer(h, w)
            else:
                h, _ = jax.lax.scan(layer, h, ws)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, gradients), value

    one, all_of_them = struct(mesh, (256, 256)), struct(mesh, (LAYERS, 256, 256))
    ws = [one] * LAYERS if broken else all_of_them
    return jax.jit(step, donate_argnums=0), (ws, struct(mesh, (512, 256), "dp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
