"""Two meshes over the same devices in the same order (jax)."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec


def same_on(sharding: Any, own: Mesh, *, count: int = 0) -> NamedSharding | None:
    """What a sharding on another mesh is on `own`.

    Only for a mesh of one axis (besides those of size 1) over the same devices in the same order:
    that axis is all axes of the own mesh together.

    Args:
      count: devices of the mesh for which `own` stands, where that may have others: a mesh of as
        many, in jax's order, counts as one of the same devices.

    Returns:
      None if it is on `own` already, or cannot be said there.
    """
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    other = sharding.mesh
    if other.axis_names == own.axis_names or other.size not in (own.size, count):
        return None
    wide = {name for name, size in other.shape.items() if size > 1}
    ids = [one.id for one in other.devices.flat]
    same = ids == [one.id for one in own.devices.flat]
    if other.size != own.size:
        same = ids == sorted(ids)
    if len(wide) > 1 or not same:
        return None
    spec = [own.axis_names if _names(part) & wide else None for part in sharding.spec]
    return NamedSharding(own, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _names(part: Any) -> set[Any]:
    return set(part) if isinstance(part, tuple) else {part}
