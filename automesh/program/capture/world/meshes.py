"""Restates shardings on another mesh over the same devices in the same order (jax)."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec


def same_on(sharding: Any, own: Mesh, *, count: int = 0) -> NamedSharding | None:
    """Returns a sharding on another mesh as one on `own`.

    This is possible for a mesh of one axis (besides axes of size 1) over the same devices in the
    same order: its axis stands for all axes of `own` together.

    Args:
      count: number of devices of the mesh that `own` replaces, if their devices may differ. A mesh
        of as many devices in jax's order then counts as one of the same devices.

    Returns:
      The sharding; None if it is on `own` already, or cannot be stated there.
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
