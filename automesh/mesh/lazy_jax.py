"""The door in the wall between what must not import jax and what does."""

from __future__ import annotations

import importlib
from typing import Any


def jax_half() -> Any:
    """`automesh.mesh.layout.devices`, imported when it is needed."""
    return _beyond_the_wall("automesh.mesh.layout.devices")


def shardings_half() -> Any:
    """`automesh.mesh.layout.shardings`, imported when it is needed."""
    return _beyond_the_wall("automesh.mesh.layout.shardings")


def applied_half() -> Any:
    """`automesh.program.infer.search.applied`, which traces steps: above this layer."""
    return _beyond_the_wall("automesh.program.infer.search.applied")


def attached_selector() -> str:
    """The name that searches give to the devices that jax has (this imports jax).

    Raises:
      UsageError: jax has none that it can use.
    """
    # It needs the table of chips besides jax, and so stands above this layer.
    return _beyond_the_wall("automesh.program.attached").attached_selector()


def _beyond_the_wall(module: str) -> Any:
    # The only door to jax: import-linter and the parent process must not see an import of it.
    return importlib.import_module(module)
