"""Logical names and a mapping make a PartitionSpec; what cannot be is an error with its reason."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import AxisType, PartitionSpec

from automesh.errors import IllegalMapping, UnknownMeshAxis, did_you_mean
from automesh.mesh.layout.place import array_label
from automesh.partition.nouns import MeshLike, ResourceMapping

DimName = str | tuple[str, ...] | None
"""The logical axis of one dimension; several where they were merged; None if it has no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShape:
    """What is known of an array when it is to be split.

    Attributes:
      path: where the array is in its tree, for errors; empty at the root.
      names: one for each dimension.
      shape: global sizes; None if only the names are known.
    """

    path: str
    names: tuple[DimName, ...]
    shape: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        """How errors call the array."""
        return array_label(self.path)


def spec_of(
    named: NamedShape,
    mapping: ResourceMapping,
    *,
    mesh: MeshLike | None = None,
    best_effort: bool = False,
) -> PartitionSpec:
    """One entry for each name: the mesh axes that split this dimension, or None.

    Args:
      named: the array.
      mapping: logical axis -> mesh axes.
      mesh: what the entries are checked against; None checks only that no axis is used twice.
      best_effort: a dimension that its mesh axes do not divide is split over the first of them
        that do, over none at worst; otherwise it is an error.

    Raises:
      IllegalMapping: a mesh axis splits two dimensions or does not divide its dimension.
      UnknownMeshAxis: the mesh does not have it.
    """
    entries = [_mesh_axes(name, mapping) for name in named.names]
    if mesh is not None:
        for name, axes in zip(named.names, entries, strict=True):
            _check_known(named, name, axes, mesh)
    if mesh is not None and named.shape is not None and best_effort:
        sized = zip(entries, named.shape, strict=False)
        entries = [_that_divide(axes, size, mesh) for axes, size in sized]
    _check_distinct(named, entries)
    if mesh is not None:
        for index, axes in enumerate(entries):
            _check_divides(named, index, axes, mesh)
    return PartitionSpec(*map(_entry, entries))


def parts_of(axes: Sequence[str], mesh: MeshLike) -> int:
    """In how many parts the mesh axes split a dimension: the product of their sizes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def mesh_axes_of(name: str, mapping: ResourceMapping) -> tuple[str, ...]:
    """The mesh axes of one logical axis; none if it is not mapped."""
    axes = mapping.get(name)
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def unknown_axis(axis: str, logical: DimName, mesh: MeshLike, *, where: str = "") -> Exception:
    """The error for a mesh axis that the mesh does not have.

    Args:
      where: ` of the array ...`, or nothing.
    """
    known = [str(name) for name in mesh.axis_names]
    return UnknownMeshAxis(
        f"axis `{_plain(logical)}`{where} is mapped to the mesh axis `{axis}`, "
        f"which is none of: {', '.join(known)}{did_you_mean(axis, known)}",
        hint="map it to an axis of the mesh, or to None",
    )


def mapped_twice(axis: str, logical: DimName, *, where: str = "") -> IllegalMapping:
    """The error for a logical axis that is mapped to one mesh axis twice.

    Args:
      where: ` of the array ...`, or nothing.
    """
    return IllegalMapping(
        f"axis `{_plain(logical)}`{where} is mapped to the mesh axis `{axis}` twice",
        hint="name each mesh axis once",
    )


def _mesh_axes(name: DimName, mapping: ResourceMapping) -> tuple[str, ...]:
    names = (name,) if isinstance(name, str) else name or ()
    return tuple(axis for one in names for axis in mesh_axes_of(one, mapping))


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return None if not axes else axes[0] if len(axes) == 1 else axes


def _that_divide(axes: tuple[str, ...], size: int, mesh: MeshLike) -> tuple[str, ...]:
    while axes and size % parts_of(axes, mesh):
        axes = axes[:-1]
    return axes


def _check_known(named: NamedShape, name: DimName, axes: tuple[str, ...], mesh: MeshLike) -> None:
    kinds: Mapping[str, AxisType] = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in axes:
        if axis not in kinds:
            raise unknown_axis(axis, name, mesh, where=f" of {named.label}")
        if kinds[axis] == AxisType.Manual:
            raise IllegalMapping(
                f"axis `{_plain(name)}` of {named.label} is mapped to the mesh axis `{axis}`, "
                "which is manual here: inside `shard_map` each device has its own part already",
                hint="map it to None inside `shard_map`",
            )


def _check_divides(named: NamedShape, index: int, axes: tuple[str, ...], mesh: MeshLike) -> None:
    if named.shape is None or not axes:
        return
    size, parts = named.shape[index], parts_of(axes, mesh)
    if size % parts:
        raise IllegalMapping(
            f"axis `{_plain(named.names[index])}` of {named.label} has size {size}, "
            f"which {_sized(axes, mesh)} does not divide",
            hint="round the axis up with `round_axis_for_partitioning`, map it to other mesh "
            "axes, or pass `best_effort=True`",
        )


def _check_distinct(named: NamedShape, entries: Sequence[tuple[str, ...]]) -> None:
    first: dict[str, int] = {}
    for index, axes in enumerate(entries):
        for axis in axes:
            if axis in first:
                raise _used_twice(named, axis, first[axis], index)
            first[axis] = index


def _used_twice(named: NamedShape, axis: str, one: int, other: int) -> IllegalMapping:
    logical = f"`{_plain(named.names[one])}`"
    if one == other:
        return mapped_twice(axis, named.names[one], where=f" of {named.label}")
    sizes = "" if named.shape is None else f" (sizes {named.shape[one]} and {named.shape[other]})"
    return IllegalMapping(
        f"axes {logical} and `{_plain(named.names[other])}` of {named.label}{sizes} are both "
        f"mapped to the mesh axis `{axis}`, which can split only one of them",
        hint="map one of them to another mesh axis, or to None",
    )


def _sized(axes: tuple[str, ...], mesh: MeshLike) -> str:
    sizes = [mesh.shape[axis] for axis in axes]
    if len(axes) == 1:
        return f"the size {sizes[0]} of mesh axis `{axes[0]}`"
    product = " * ".join(map(str, sizes))
    names = ", ".join(f"`{axis}`" for axis in axes)
    return f"the size {product} = {math.prod(sizes)} of mesh axes {names}"


def _plain(name: DimName) -> str:
    return name if isinstance(name, str) else "*".join(name or ())
