"""Attention whose keys have a bias, trained by Adam: the gradient of that bias cancels.

A softmax does not change if all of its inputs grow alike, so what is left of that gradient is
rounding, and the first step of Adam makes steps of full size of it.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh

ROWS, LENGTH, WIDTH, HEADS = 8, 16, 32, 4


def build(mesh, dtype="float32"):
    def loss_of(params, x):
        params = jax.tree.map(lambda one: one.astype(dtype), params)
        x = x.astype(dtype)
        query, value = x @ params["query"], x @ params["value"]
        key = x @ params["key"] + params["key_bias"]

        def split(one):
            return one.reshape(*one.shape[:2], HEADS, -1)

        scores = jnp.einsum("bqhd,bkhd->bhqk", split(query), split(key))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), split(value))
        return jnp.mean((mixed.reshape(x.shape) - x) ** 2)

    def step(state, x):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["m"], grads)
        v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, state["v"], grads)
        params = jax.tree.map(
            lambda p, m, v: p - 1e-3 * (m / 0.1) / (jnp.sqrt(v / 0.001) + 1e-12),
            state["params"],
            m,
            v,
        )
        return {"params": params, "m": m, "v": v}, loss

    specs = {"query": P(None, "tp"), "key": P(None, "tp"), "value": P(None, "tp")}

    def arrays(make):
        tree = {name: make((WIDTH, WIDTH), spec) for name, spec in specs.items()}
        return {**tree, "key_bias": make((WIDTH,), P("tp"))}

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    def init(mesh):
        def make(group, number):
            def array(shape, spec):
                key = jax.random.fold_in(jax.random.key(number), shape[-1] + len(shape))
                made = 0.1 * jax.random.normal(key, shape) * (group == "params")
                return jax.device_put(made, NamedSharding(mesh, spec))

            return array

        state = {group: arrays(make(group, 0)) for group in ("params", "m", "v")}
        x = jax.random.normal(jax.random.key(1), (ROWS, LENGTH, WIDTH))
        return state, jax.device_put(x, NamedSharding(mesh, P("dp")))

    state = {group: arrays(struct) for group in ("params", "m", "v")}
    args = state, struct((ROWS, LENGTH, WIDTH), P("dp"))
    return automesh.Workload(jax.jit(step), args, init=init)
