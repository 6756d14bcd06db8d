"""Functions to be checked: each has one thing to be mended, or worth knowing."""

import itertools
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import automesh

NAMES = {"query", "key", "value", "gate", "up", "down", "first", "second"}
CALLS = itertools.count()


def struct(mesh, shape, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def arguments(mesh):
    return struct(mesh, (16, 16), None, "tp"), struct(mesh, (8, 16), "dp")


def update(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def nothing_split(mesh):
    return update, (jnp.ones((16, 16)), jnp.ones((8, 16)))


def no_loss(mesh):
    return (lambda w, x: update(w, x)[0]), arguments(mesh)


def lost(mesh):
    """A step that gives its weights away and does not return them."""
    return jax.jit(lambda w, x: update(w, x)[1], donate_argnums=0), arguments(mesh)


def other_axes(mesh):
    return update, (struct(mesh, (16, 16), None, "model"), struct(mesh, (8, 16), "data"))


def indivisible(mesh):
    """A mesh of any axis will do but `tp`."""
    return update, (struct(mesh, (16, 3), "dp", "tp"), struct(mesh, (8, 16), "dp"))


def mesh_in_facts(mesh):
    return automesh.Workload(update, arguments(mesh), facts={"batch": 8 * mesh.size})


def unfit_baseline(mesh):
    return automesh.Workload(update, arguments(mesh), baseline="dp:3")


def changing(mesh):
    """Other arguments at every call."""
    rows = 16 + next(CALLS)
    return update, (struct(mesh, (rows, 16), None, "tp"), struct(mesh, (8, rows), "dp"))


def timed(mesh):
    def step(w, x):
        w, loss = update(w, x)
        return w, jnp.where(loss < 0, float(time.time_ns() % 10_000_019), loss)

    return step, arguments(mesh)


def ordered(mesh):
    """The order of a set is that of the process."""

    def step(w, x):
        loss, grads = jax.value_and_grad(lambda w: sum(jnp.mean((x @ w[n]) ** 2) for n in NAMES))(w)
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss

    w = {name: struct(mesh, (16, 4 + k)) for k, name in enumerate(sorted(NAMES))}
    return step, (w, struct(mesh, (8, 16), "dp"))


def raising(mesh):
    raise ValueError("there is no such layer")


def everything(mesh, width=16, fused=False):
    """What all can be said of a step that is ready."""

    def step(state, batch, *, rate, config):
        def loss_of(layers):
            x = state["embed"][batch["ids"]]
            for layer in layers:
                x = jnp.tanh(x @ layer["w"])
            return jnp.mean(x**2) / jnp.sqrt(state["scale"]).mean() * config["weight"]

        loss, grads = jax.value_and_grad(loss_of)(state["layers"])
        layers = jax.tree.map(lambda p, g: p - rate * g, state["layers"], grads)
        return {**state, "layers": layers}, {"loss": loss}

    state = {
        "embed": struct(mesh, (1000, width), None, "tp"),
        "layers": [{"w": struct(mesh, (width, width), None, "tp")} for _ in range(3)],
        "scale": jnp.ones(4),
    }
    return automesh.Workload(
        lambda state, batch, rate: step(state, batch, rate=rate, config={"weight": 1.0}),
        (state, {"ids": struct(mesh, (8, 4), "dp", dtype="int32")}),
        kwargs={"rate": struct(mesh, ())},
        init=lambda _: {
            **jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), state),
        },
        facts={"batch": 8},
        tokens_per_step=32,
        baseline="dp:-1",
    )


def nothing_to_compare(mesh):
    """A step that returns no number and carries nothing on."""
    return (lambda w, x: jnp.argmax(x @ w, axis=1)), arguments(mesh)
