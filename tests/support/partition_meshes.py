"""Meshes and contexts for the tests of `automesh.partition`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AUTO = (AxisType.Auto, AxisType.Auto)
EXPLICIT = (AxisType.Explicit, AxisType.Explicit)
MIXED = (AxisType.Explicit, AxisType.Auto)


def mesh_of(types: tuple[AxisType, ...] = AUTO, *, order: int = 1) -> Mesh:
    """8 devices as data 4, model 2; with order -1 in reverse."""
    devices = np.array(jax.devices()[:8])[::order].reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=types)


@contextmanager
def legacy(mesh: Mesh) -> Iterator[None]:
    """`with mesh:`, which jax deprecates and people use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`with mesh:`", DeprecationWarning)
        context = mesh.__enter__()
    try:
        yield
    finally:
        context.__exit__(None, None, None)


@contextmanager
def nothing(mesh: Mesh) -> Iterator[None]:
    yield


# How the mesh is made known: the context, and what is passed to `shard`.
CONTEXTS: dict[
    str, tuple[Callable[[Mesh], AbstractContextManager[Any]], Callable[[Mesh], Mesh | None]]
] = {
    "set_mesh": (jax.set_mesh, lambda mesh: None),
    "legacy": (legacy, lambda mesh: None),
    "argument": (nothing, lambda mesh: mesh),
    "both": (jax.set_mesh, lambda mesh: mesh),
}
