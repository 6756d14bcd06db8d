"""automesh finds the fastest device mesh for a JAX training step, and proves it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automesh.api import Result, Results, calibrate, explain, load, search, show, targets
    from automesh.errors import AutomeshError, NoFeasibleMesh, UsageError
    from automesh.mesh.axes import MeshAxis, Plan
    from automesh.mesh.config import MeshConfig, Rules
    from automesh.mesh.evidence import Evidence
    from automesh.mesh.rules import MeshRule
    from automesh.mesh.shape import HybridMeshShape
    from automesh.program.workload import Workload

_HOMES = {
    "automesh.api": (
        "Result",
        "Results",
        "calibrate",
        "explain",
        "load",
        "search",
        "show",
        "targets",
    ),
    "automesh.errors": ("AutomeshError", "NoFeasibleMesh", "UsageError"),
    "automesh.mesh.axes": ("MeshAxis", "Plan"),
    "automesh.mesh.config": ("MeshConfig", "Rules"),
    "automesh.mesh.evidence": ("Evidence",),
    "automesh.mesh.rules": ("MeshRule",),
    "automesh.mesh.shape": ("HybridMeshShape",),
    "automesh.program.workload": ("Workload",),
}

__all__ = [
    "AutomeshError",
    "Evidence",
    "HybridMeshShape",
    "MeshAxis",
    "MeshConfig",
    "MeshRule",
    "NoFeasibleMesh",
    "Plan",
    "Result",
    "Results",
    "Rules",
    "UsageError",
    "Workload",
    "calibrate",
    "explain",
    "load",
    "search",
    "show",
    "targets",
]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a training script that wants `load` should not wait for the search.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module `automesh` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted(__all__)
