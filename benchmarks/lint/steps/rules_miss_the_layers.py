"""A layout map whose pattern no longer matches the names of the layers: keras-hub#2806.

finding: repeated-work
mesh: dp:2,tp:-1
line: 25
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    # As written, the pattern says `decoder_block`, and the layers are called `transformer_layer`.
    up, down = ((), ()) if broken else ((None, "tp"), ("tp",))

    def loss(p, x):
        q = x @ p["query"]
        x = x + jnp.tanh(q) @ p["out"]
        h = jax.nn.gelu(x @ p["up"])
        return jnp.mean((x + h @ p["down"]) ** 2)

    def step(p, x):
        value, g = jax.value_and_grad(loss)(p, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, p, g), value

    p = {
        "query": struct(mesh, (512, 512), None, "tp"),
        "out": struct(mesh, (512, 512), "tp"),
        "up": struct(mesh, (512, 2048), *up),
        "down": struct(mesh, (2048, 512), *down),
    }
    same = jax.tree.map(lambda one: one.sharding, p)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(same, None))
    return jitted, (p, struct(mesh, (16, 128, 512), "dp"))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
