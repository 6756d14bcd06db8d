"""The logical axis of the embedding has no rule: most of the state is whole, though fsdp splits it.

finding: replicated-state
mesh: fsdp:-1
line: 31
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def make(mesh, broken):
    rules = {"embed_in": "fsdp"} if broken else {"embed_in": "fsdp", "embed": "fsdp"}
    names = {"emb": ("vocab", "embed"), "up": ("embed_in", "mlp"), "down": ("embed_in", "mlp")}
    shapes = {"emb": (8192, 512), "up": (512, 512), "down": (512, 512)}
    state = {
        part: {n: struct(mesh, shapes[n], *map(rules.get, names[n])) for n in names}
        for part in ("params", "mu", "nu")
    }

    def loss(p, ids):
        h = p["emb"][ids]
        return jnp.mean(((h + jax.nn.gelu(h @ p["up"]) @ p["down"]) @ p["emb"].T) ** 2)

    def step(s, ids):
        value, g = jax.value_and_grad(loss)(s["params"], ids)
        mu = jax.tree.map(lambda m, one: 0.9 * m + 0.1 * one, s["mu"], g)
        nu = jax.tree.map(lambda v, one: 0.99 * v + 0.01 * one**2, s["nu"], g)
        new = jax.tree.map(lambda w, m, v: w - 0.1 * m / (v**0.5 + 1e-6), s["params"], mu, nu)
        return {"params": new, "mu": mu, "nu": nu}, value

    kept = jax.tree.map(lambda one: one.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted, (state, struct(mesh, (16, 64), "fsdp", dtype=jnp.int32))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
