"""automesh finds the fastest device mesh for a JAX training step, and proves it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from automesh import partition, pipeline
    from automesh.api import (
        Result,
        Results,
        ScriptCheck,
        calibrate,
        check,
        check_script,
        explain,
        export,
        import_rules,
        lint,
        load,
        presets,
        search,
        show,
        targets,
    )
    from automesh.errors import AutomeshError, NoFeasibleMesh, UsageError
    from automesh.mesh.axes import MeshAxis, Plan
    from automesh.mesh.config import MeshConfig, Rules
    from automesh.mesh.evidence import Evidence
    from automesh.mesh.infer import infer_mesh_shape
    from automesh.mesh.layout.batches import (
        DataPartitionType,
        global_to_host_array,
        host_to_global_device_array,
        input_partition_spec,
    )
    from automesh.mesh.layout.constraint import with_sharding_constraint
    from automesh.mesh.layout.cpu import cpu_context, create_cpu_mesh, force_cpu
    from automesh.mesh.layout.create import create_mesh
    from automesh.mesh.layout.hosts import calculate_host_mesh_shape
    from automesh.mesh.layout.parse import parse_mesh_from_string
    from automesh.mesh.presets import make_ddp_mesh_config, make_fsdp_mesh_config
    from automesh.mesh.rules.rule import MeshRule
    from automesh.mesh.shape import HybridMeshShape
    from automesh.program.script.workload import Workload

_HOMES = {
    "automesh.api": (
        "Result",
        "Results",
        "ScriptCheck",
        "calibrate",
        "check",
        "check_script",
        "explain",
        "export",
        "import_rules",
        "lint",
        "load",
        "presets",
        "search",
        "show",
        "targets",
    ),
    "automesh.errors": ("AutomeshError", "NoFeasibleMesh", "UsageError"),
    "automesh.mesh.axes": ("MeshAxis", "Plan"),
    "automesh.mesh.config": ("MeshConfig", "Rules"),
    "automesh.mesh.layout.batches": (
        "DataPartitionType",
        "global_to_host_array",
        "host_to_global_device_array",
        "input_partition_spec",
    ),
    "automesh.mesh.layout.constraint": ("with_sharding_constraint",),
    "automesh.mesh.layout.cpu": (
        "cpu_context",
        "create_cpu_mesh",
        "force_cpu",
    ),
    "automesh.mesh.layout.create": ("create_mesh",),
    "automesh.mesh.layout.hosts": ("calculate_host_mesh_shape",),
    "automesh.mesh.layout.parse": ("parse_mesh_from_string",),
    "automesh.mesh.evidence": ("Evidence",),
    "automesh.mesh.infer": ("infer_mesh_shape",),
    "automesh.mesh.presets": ("make_ddp_mesh_config", "make_fsdp_mesh_config"),
    "automesh.mesh.rules.rule": ("MeshRule",),
    "automesh.mesh.shape": ("HybridMeshShape",),
    "automesh.program.script.workload": ("Workload",),
}

# Public libraries of their own.
_LIBRARIES = ("partition", "pipeline")

__all__ = [
    "AutomeshError",
    "DataPartitionType",
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
    "ScriptCheck",
    "UsageError",
    "Workload",
    "calculate_host_mesh_shape",
    "calibrate",
    "check",
    "check_script",
    "cpu_context",
    "create_cpu_mesh",
    "create_mesh",
    "explain",
    "export",
    "force_cpu",
    "global_to_host_array",
    "host_to_global_device_array",
    "import_rules",
    "infer_mesh_shape",
    "input_partition_spec",
    "lint",
    "load",
    "make_ddp_mesh_config",
    "make_fsdp_mesh_config",
    "parse_mesh_from_string",
    "partition",
    "pipeline",
    "presets",
    "search",
    "show",
    "targets",
    "with_sharding_constraint",
]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: a training script that wants `load` should not wait for the search.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    if name in _LIBRARIES:
        return importlib.import_module(f"automesh.{name}")
    raise AttributeError(f"module `automesh` has no attribute `{name}`")


def __dir__() -> list[str]:
    return sorted(__all__)
