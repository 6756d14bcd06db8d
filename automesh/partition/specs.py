"""Converts logical axes to mesh axes, specs and shardings, or raises an error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from automesh.errors import IllegalMapping, UnknownMeshAxis, WrongType, did_you_mean, kind_of
from automesh.mesh.layout.place import array_label
from automesh.partition.mapping import mapping_or_current, require_mesh
from automesh.partition.nouns import (
    AxisLike,
    AxisSelection,
    AxisSelector,
    MeshLike,
    PhysicalAxisSpec,
    ResourceMapping,
    is_integer,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

A = TypeVar("A", bound=AxisLike)
DimName = str | tuple[str, ...] | None
"""The logical axis of one dimension; several where they were merged; None if it has no name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShape:
    """The names and sizes of an array that is to be split.

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
        """Names the array in errors."""
        return array_label(self.path)


def spec_of(
    named: NamedShape,
    mapping: ResourceMapping,
    *,
    mesh: MeshLike | None = None,
    best_effort: bool = False,
) -> PartitionSpec:
    """Returns one entry for each name: the mesh axes that split this dimension, or None.

    Args:
      named: the array.
      mapping: logical axis -> mesh axes.
      mesh: mesh for checking the entries; None only checks that no axis is used twice.
      best_effort: a dimension that its mesh axes do not divide is split over the first of them that
        do, over none at worst; otherwise it is an error.

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
    """Counts the parts of a dimension that mesh axes split: the product of their sizes."""
    return math.prod(mesh.shape[axis] for axis in axes)


def mesh_axes_of(name: str, mapping: ResourceMapping) -> tuple[str, ...]:
    """Returns the mesh axes of one logical axis; none if it is not mapped."""
    axes = mapping.get(name)
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def unknown_axis(axis: str, logical: DimName, mesh: MeshLike, *, where: str = "") -> Exception:
    """Makes the error for a mesh axis that the mesh does not have.

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
    """Makes the error for a logical axis that is mapped to one mesh axis twice.

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


def physical_axis_name(
    axis: AxisSelector, mapping: ResourceMapping | None = None
) -> PhysicalAxisSpec | None:
    """Returns the mesh axis or axes of a logical axis; None if it is not mapped.

    Example:
      >>> from automesh.partition import physical_axis_name
      >>> physical_axis_name("mlp", {"mlp": ("tp", "sp")})
      ('tp', 'sp')

    Args:
      axis: an axis, or its name.
      mapping: default: that of the context.
    """
    return (mapping_or_current(mapping) or {}).get(name_of(axis))


def physical_axis_size(axis: AxisSelector, mapping: ResourceMapping | None = None) -> int | None:
    """Returns the product of the sizes of a logical axis's mesh axes; None if it is not mapped.

    Example:
      >>> import jax
      >>> from automesh.partition import physical_axis_size
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
      >>> with jax.set_mesh(mesh):
      ...     physical_axis_size("vocab", {"vocab": ("data", "model")})
      8

    Args:
      axis: an axis, or its name.
      mapping: default: that of the context.

    Raises:
      UsageError: it is mapped, and no mesh is in force here.
      UnknownMeshAxis: it is mapped to an axis that the mesh does not have.
      IllegalMapping: it is mapped to one axis twice.
    """
    name, found = name_of(axis), mapping_or_current(mapping) or {}
    if found.get(name) is None:
        return None
    mesh, axes = require_mesh(), mesh_axes_of(name, found)
    for one in axes:
        if one not in mesh.axis_names:
            raise unknown_axis(one, name, mesh)
        if axes.count(one) > 1:
            raise mapped_twice(one, name)
    return parts_of(axes, mesh)


def round_axis_for_partitioning(axis: A, mapping: ResourceMapping | None = None) -> A:
    """Rounds the size of an axis up to a multiple of the size of its mesh axes.

    Example:
      >>> import jax
      >>> from automesh.partition import Axis, round_axis_for_partitioning
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
      >>> with jax.set_mesh(mesh):
      ...     round_axis_for_partitioning(Axis("vocab", 50257), {"vocab": "model"})
      Axis(name='vocab', size=50258)

    Args:
      axis: an `Axis` of automesh or of Haliax, or any dataclass with a name and a size.
      mapping: default: that of the context.

    Returns:
      The same axis if it is not mapped (for which no mesh is needed).

    Raises:
      UsageError: it is mapped, and no mesh is in force here.
      UnknownMeshAxis: it is mapped to an axis that the mesh does not have.
      WrongType: `axis` has no name and size.
    """
    if not dataclasses.is_dataclass(axis) or not is_integer(getattr(axis, "size", None)):
        raise WrongType(
            f"an axis to round must have a name and a size, got {kind_of(axis)}",
            hint="write for example `Axis('vocab', 50257)`",
        )
    parts = physical_axis_size(axis, mapping)
    if parts is None:
        return axis
    whole = cast("DataclassInstance", axis)
    return cast(A, dataclasses.replace(whole, size=-(-axis.size // parts) * parts))


def pspec_for_axis(axis: AxisSelection, mapping: ResourceMapping | None = None) -> PartitionSpec:
    """Returns the PartitionSpec of an array with these axes, one entry for each.

    Example:
      >>> from automesh.partition import pspec_for_axis
      >>> tuple(pspec_for_axis(("batch", "head", "embed"), {"batch": "dp", "embed": "tp"}))
      ('dp', None, 'tp')

    Args:
      axis: one axis or several, or their names.
      mapping: default: that of the context; without one nothing is split.

    Raises:
      IllegalMapping: two of the axes are mapped to the same mesh axis.
    """
    return spec_of(_named(axis), mapping_or_current(mapping) or {})


def sharding_for_axis(
    axis: AxisSelection, mapping: ResourceMapping | None = None, mesh: MeshLike | None = None
) -> NamedSharding:
    """Returns the sharding of an array with these axes. Their sizes, if given, are not checked.

    Example:
      >>> import jax
      >>> from automesh.partition import sharding_for_axis
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
      >>> sharding_for_axis(("batch", "embed"), {"batch": "data"}, mesh).num_devices
      8

    Args:
      axis: one axis or several, or their names.
      mapping: default: that of the context; without one nothing is split.
      mesh: default: that of the context.

    Raises:
      UsageError: no mesh is in force here.
      IllegalMapping: two of the axes are mapped to the same mesh axis.
      UnknownMeshAxis: one is mapped to an axis that the mesh does not have.
    """
    found = require_mesh(mesh)
    spec = spec_of(_named(axis), mapping_or_current(mapping) or {}, mesh=found)
    return NamedSharding(found, spec)


def name_of(axis: object) -> str:
    """Returns the name of an axis, which may be given as an axis or a name.

    Raises:
      WrongType: it is neither.
    """
    name = axis if isinstance(axis, str) else getattr(axis, "name", None)
    if not isinstance(name, str):
        raise WrongType(
            f"an axis must be an Axis or its name, got {kind_of(axis)}",
            hint="write for example `'embed'` or `Axis('embed', 512)`",
        )
    return name


def _named(axis: AxisSelection) -> NamedShape:
    several = isinstance(axis, Mapping) or (
        isinstance(axis, Iterable) and not isinstance(axis, str)
    )
    chosen: Iterable[Any] = cast("Iterable[Any]", axis) if several else (axis,)
    return NamedShape(path="", names=tuple(name_of(one) for one in chosen))
