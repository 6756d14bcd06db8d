"""Runs the example scripts inside the test process; each configuration once."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

from tests.support.paths import EXAMPLES

NAMES = ("dense_lm", "moe_lm", "long_context")
AXES = ("dp", "fsdp", "ep", "tp", "sp")
COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What training gave: the losses in order, the kinds of collectives in the program."""

    losses: tuple[float, ...]
    collectives: frozenset[str]


def module(name: str) -> ModuleType:
    """Imports a module of the examples, which find each other through their own directory."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


@contextmanager
def arguments(name: str, *words: str) -> Iterator[None]:
    """Lets a script find `words` on its command line."""
    with mock.patch.object(sys, "argv", [f"{name}.py", *words]):
        yield


def device_mesh(sizes: dict[str, int]) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), AXES)


def build(name: str, sizes: dict[str, int], *, size: str = "tiny", **knobs: object):
    with arguments(name, "--size", size):
        return module(name).build(device_mesh(sizes), **knobs)


@functools.cache
def run(
    name: str,
    sizes: tuple[tuple[str, int], ...] = (),
    knobs: tuple[tuple[str, object], ...] = (),
    steps: int = 30,
) -> Run:
    """Trains the tiny preset on successive batches of the text."""
    workload = build(name, dict(sizes), **dict(knobs))
    compiled = workload.step.lower(*workload.args).compile()
    hlo = compiled.as_text()
    state, first = workload.init(device_mesh(dict(sizes)))
    batches = module("lm.text").batches(*first["inputs"].shape)
    losses = []
    for batch in itertools.islice(batches, steps):
        shardings = {key: array.sharding for key, array in first.items()}
        state, metrics = compiled(state, jax.device_put(batch, shardings))
        losses.append(float(metrics["loss"]))
    kinds = frozenset(kind for kind in COLLECTIVES if f" {kind}(" in hlo)
    return Run(losses=tuple(losses), collectives=kinds)
