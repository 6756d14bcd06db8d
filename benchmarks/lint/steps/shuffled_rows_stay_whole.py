"""Minibatches of PPO: the rows of a rollout are shuffled, and nothing splits them afterwards.

finding: repeated-work
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
    split = NamedSharding(mesh, P(None, "dp"))

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def update(w, part):
        value, g = jax.value_and_grad(loss)(w, part)
        return w - 0.1 * g, value

    def step(w, x, seed):
        rows = jax.random.permutation(jax.random.key(seed), x)
        parts = rows.reshape(4, 1024, 512)
        if not broken:
            parts = jax.lax.with_sharding_constraint(parts, split)
        return jax.lax.scan(update, w, parts)

    w, x = struct(mesh, (512, 2048)), struct(mesh, (4096, 512), "dp")
    return jax.jit(step, donate_argnums=0), (w, x, struct(mesh, (), dtype=jnp.int32))


def build(mesh):
    return make(mesh, broken=True)


def mended(mesh):
    return make(mesh, broken=False)
