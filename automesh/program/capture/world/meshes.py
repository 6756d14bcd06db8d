"""The meshes that a script makes: the names of their axes, and two meshes over the same devices in
the same order (jax).

jax keeps one object for all meshes that are equal, and members of an enumeration of texts
(`class Axis(str, Enum)`) are equal to their texts. So a script that names its axes by members would
get a mesh that automesh has made with texts, and `axis is Axis.DATA` and `axis.value` would fail.
While the script runs, its meshes have its members as names; before and after, they have the texts,
with which automesh works. Attributes of jax's meshes, looked at in jax 0.10.1 to 0.12.0.1:
`axis_names`, and `shape` and `shape_tuple`, which are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.program.spec_entries import entries_of

# The meshes whose names are a script's members now, with their texts.
_RENAMED: list[tuple[Any, tuple[Any, ...]]] = []


def text_of(name: Any) -> Any:
    """Returns the text of a member of an enumeration of texts; returns any other name unchanged."""
    return str.__str__(name) if isinstance(name, str) else name


def with_names(mesh: Mesh, names: Sequence[Any]) -> Mesh:
    """Makes a mesh have the script's own objects as names of its axes, until `names_put_back`
    restores the texts.

    Args:
      names: of axes, as the script gives them; equal to those that the mesh has.
    """
    own = {name: name for name in names if isinstance(name, str) and type(name) is not str}
    if own:
        for one in (mesh, mesh.abstract_mesh):
            _RENAMED.append((one, tuple(map(text_of, one.axis_names))))
            _rename(one, tuple(own.get(name, name) for name in one.axis_names))
    return mesh


def names_put_back() -> Callable[[], None]:
    """Returns a function that gives all meshes the texts of their names again."""

    def put_back() -> None:
        for mesh, texts in _RENAMED:
            _rename(mesh, texts)
        _RENAMED.clear()

    return put_back


def _rename(mesh: Any, names: tuple[Any, ...]) -> None:
    object.__setattr__(mesh, "axis_names", names)
    for computed in ("shape", "shape_tuple"):
        vars(mesh).pop(computed, None)


def same_on(sharding: Any, own: Mesh, *, count: int = 0) -> NamedSharding | None:
    """Returns a sharding that lies on another mesh, as a sharding on `own`.

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
    spec = [own.axis_names if _names(part) & wide else None for part in entries_of(sharding.spec)]
    return NamedSharding(own, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _names(part: Any) -> set[Any]:
    return set(part) if isinstance(part, tuple) else {part}
