"""The door to the half of `automesh.mesh` that imports jax."""

from __future__ import annotations

import importlib
from typing import Any


def jax_half() -> Any:
    """`automesh.mesh.devices`, imported when it is needed."""
    # The only door to jax: import-linter and the parent process must not see an import of it.
    return importlib.import_module("automesh.mesh.devices")
