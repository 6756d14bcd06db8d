"""Meshes that experts give as one row of devices, as parts inside of granules and between them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from automesh.mesh.axes import DEFAULT_AXES, MeshAxis

# The outermost first; AXLearn lays a mesh row by row over the devices where it cannot split it.
_ROW_MAJOR = ("dp", "ep", "fsdp", "sp", "tp")


def split_over_granules(mesh: Mapping[str, int], granule: int) -> tuple[MeshAxis, ...] | None:
    """One mesh, laid row by row over the devices, as parts inside of granules and between them.

    Args:
      mesh: in our axes.
      granule: devices of one granule.

    Returns:
      None if rows of the mesh and granules do not end at the same devices.

    >>> format_mesh(split_over_granules({"dp": 4, "fsdp": 16}, 8))
    'dcn.dp:4,dcn.fsdp:2,fsdp:8'
    """
    left, parts = granule, dict[str, MeshAxis]()
    for name in reversed(_ROW_MAJOR):
        size = mesh.get(name, 1)
        inside = math.gcd(size, left)
        if inside not in (size, left):
            return None
        left //= inside
        parts[name] = MeshAxis(name=name, ici=inside, dcn=size // inside)
    return tuple(parts[name] for name in DEFAULT_AXES) if left == 1 else None
