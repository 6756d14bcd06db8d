"""A step whose trace depends on more than its arguments, at two of three values of a knob."""

import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

HEADS = {"first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"}


def build(mesh, order="sorted"):
    def loss(params, x):
        # Python orders a set of strings in another way in every process that has a seed of its own.
        names = HEADS if order == "set" else sorted(HEADS)
        total = sum(jnp.mean(jnp.tanh(x @ params[name]) ** 2) for name in names)
        if order == "time":
            # It is never below 0: what the step computes stays the same.
            total = jnp.where(total < 0, float(time.time_ns() % 10_000_019), total)
        return total

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    params = {name: struct((16, 8 + width)) for width, name in enumerate(sorted(HEADS))}
    return jax.jit(step, donate_argnums=0), (params, struct((8, 16), "dp"))
