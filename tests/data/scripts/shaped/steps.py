"""A workload in a package; its step looks up axis names in rules that a context puts in force."""

import contextlib

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh

_RULES = []


@contextlib.contextmanager
def logical_axis_rules(mesh, **rules):
    _RULES.append((mesh, rules))
    try:
        yield
    finally:
        _RULES.pop()


def constrain(array, *names):
    mesh, rules = _RULES[-1]
    return jax.lax.with_sharding_constraint(
        array, NamedSharding(mesh, P(*(rules.get(name) for name in names)))
    )


def step(weights, batch):
    def loss_of(w):
        hidden = constrain(jax.nn.gelu(batch @ w["in"]), "batch", "hidden")
        return jnp.mean((hidden @ w["out"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return loss, jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)


def advance(outputs, args):
    _, weights = outputs
    return weights, args[1]


def make_step(mesh):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    weights = {"in": struct((32, 64), None, "tp"), "out": struct((64, 8), "tp")}
    batch = struct((16, 32), "dp")
    return automesh.Workload(
        step,
        (weights, batch),
        advance=advance,
        context=logical_axis_rules(mesh, batch="dp", hidden="tp"),
    )
