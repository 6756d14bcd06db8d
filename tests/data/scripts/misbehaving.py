"""A small step whose `build` does, knob by knob, what a build function should not do."""

import ctypes
import os
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from automesh import Workload

# Of a matrix that is multiplied for nothing: the three smallest are the finalists.
EXTRA = {"aborts_when_run": 64, "healthy": 128, "forks": 512}


def allocates():
    kept = []
    while True:
        kept.append(b"x" * 2**25)
        time.sleep(0.02)


def prints():
    line = "x" * 999 + "\n"
    for _ in range(100_000):
        sys.stdout.write(line)


def closes():
    sys.stdout.close()
    os.close(1)
    os.close(2)


def replaces():
    sys.stdout = sys.stderr = 42


def forks():
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
        os._exit(0)


def spoils():
    SPOILED.append(True)


def raises():
    raise ValueError("there is no such layer")


SPOILED = []
HABITS = {
    "spoils": spoils,
    "aborts": os.abort,
    "segfaults": lambda: ctypes.string_at(0),
    "hangs": lambda: time.sleep(1000),
    "allocates": allocates,
    "prints": prints,
    "exits": lambda: sys.exit(0),
    "raises": raises,
    "closes": closes,
    "replaces": replaces,
    "forks": forks,
}


def build(mesh, habit="healthy"):
    if SPOILED:
        os.abort()  # Whichever plan comes next in this process: it is not to blame.
    HABITS.get(habit, lambda: None)()
    if habit == "garbage":
        return 42
    width = EXTRA.get(habit, 1024)

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def step(weight, batch, extra):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(batch @ w) ** 2))(weight)
        # Work that costs, and changes nothing.
        return weight - 0.01 * grad, loss + 0.0 * jnp.sum(extra @ extra)

    args = (struct((64, 64)), struct((16, 64), "dp"), struct((width, width)))
    if habit == "aborts_when_run":
        return Workload(jax.jit(step), args, init=lambda mesh: os.abort())
    return jax.jit(step), args
