"""States the shardings of a program on one mesh (jax's MLIR bindings).

A script may make a second mesh of one axis over the same devices, as
`Mesh(mesh.devices.reshape(-1), ("all",))`, and split some arrays over that. Its axis stands for all
axes of the script's own mesh together, so that the program says the same with one mesh, which is
what the estimates count with.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from automesh.program.notes import note
from automesh.sharding.passes import bindings
from automesh.texts.exceptions import in_one_line

# As in `sdy.mesh @mesh_0 = <["all"=8]> {...}`. A mesh whose devices have another order also has
# `device_ids`, and keeps its own.
_MESH = re.compile(r"^ *sdy\.mesh @(\w+) = <\[([^\]]*)\]>.*$", re.MULTILINE)
_AXIS = re.compile(r'"([^"]*)"=(\d+)')
# A sharding: `<@mesh_0, [{"all"}, {}]>`, also with `replicated={...}` behind the dimensions.
_SHARDING = r"<@{mesh}, \[[^\]]*\][^>]*>"
_MANUAL = re.compile(r"manual_axes=\{[^}]*\}")
_GROUPS = r"mesh = @{mesh}, axes = \[[^\]]*\]"


def on_one_mesh(module: Any, names: Sequence[str]) -> Any:
    """Returns a module whose other meshes of one axis over all devices are replaced by the step's.

    Args:
      module: an MLIR module with Shardy's dialect.
      names: the axes of the step's mesh.

    Returns:
      The module itself, if there is nothing to replace.
    """
    meshes = [one for one in module.body.operations if one.operation.name == "sdy.mesh"]
    if len(meshes) < 2:
        return module
    text = module.operation.get_asm(enable_debug_info=True)
    sizes = {
        found[1]: {name: int(size) for name, size in _AXIS.findall(found[2])}
        for found in _MESH.finditer(text)
    }
    own = next((mesh for mesh, axes in sizes.items() if set(axes) == set(names)), None)
    if own is None:
        return module
    flat = {mesh: axis for mesh, axes in sizes.items() if (axis := _axis_of_all(axes, sizes[own]))}
    if not flat:
        return module
    for mesh, axis in flat.items():
        text = _replaced(text, mesh, axis, own, tuple(sizes[own]))
    ir = bindings().ir
    try:
        with module.context, ir.Location.unknown():
            return ir.Module.parse(text)
    except ir.MLIRError as error:
        note(f"a second mesh of the step stays as it is: {in_one_line(error)}")
        return module


def _axis_of_all(axes: Mapping[str, int], own: Mapping[str, int]) -> str:
    """Returns the only axis of a mesh; empty if it has several, or not as many devices as the
    step's mesh."""
    is_all = math.prod(axes.values()) == math.prod(own.values()) and set(axes) != set(own)
    return next(iter(axes)) if is_all and len(axes) == 1 else ""


def _replaced(text: str, mesh: str, axis: str, own: str, names: Sequence[str]) -> str:
    """Replaces the axis of a mesh by all axes of the step's mesh, wherever the mesh is named."""
    listed = ", ".join(f'"{name}"' for name in names)
    referred = ", ".join(f'#stablehlo.axis_ref<name = "{name}">' for name in names)

    def in_sharding(found: re.Match[str]) -> str:
        return found[0].replace(f"<@{mesh},", f"<@{own},").replace(f'"{axis}"', listed)

    def in_groups(found: re.Match[str]) -> str:
        said = found[0].replace(f"@{mesh},", f"@{own},")
        return said.replace(f'#stablehlo.axis_ref<name = "{axis}">', referred)

    lines = [
        line for line in text.split("\n") if not line.lstrip().startswith(f"sdy.mesh @{mesh} ")
    ]
    for number, line in enumerate(lines):
        if f"@{mesh}," not in line:
            continue
        changed = re.sub(_SHARDING.format(mesh=mesh), in_sharding, line)
        if "sdy.manual_computation" in line:
            changed = _MANUAL.sub(lambda found: found[0].replace(f'"{axis}"', listed), changed)
        lines[number] = re.sub(_GROUPS.format(mesh=mesh), in_groups, changed)
    return "\n".join(lines)
