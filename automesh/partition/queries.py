"""What a logical axis becomes on the mesh: its mesh axes, their size, a spec, a sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jax.sharding import NamedSharding, PartitionSpec

from automesh.errors import WrongType, kind_of
from automesh.partition.context import require_mesh
from automesh.partition.mapping import mapping_or_current
from automesh.partition.nouns import (
    AxisLike,
    AxisSelection,
    AxisSelector,
    MeshLike,
    PhysicalAxisSpec,
    ResourceMapping,
    is_integer,
)
from automesh.partition.specs import (
    NamedShape,
    mapped_twice,
    mesh_axes_of,
    parts_of,
    spec_of,
    unknown_axis,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

A = TypeVar("A", bound=AxisLike)


def physical_axis_name(
    axis: AxisSelector, mapping: ResourceMapping | None = None
) -> PhysicalAxisSpec | None:
    """The mesh axis or axes of a logical axis; None if it is not mapped.

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
    """The product of the sizes of the mesh axes of a logical axis; None if it is not mapped.

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
      UsageError: it is mapped, and no mesh holds here.
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
    """The axis, its size rounded up to a multiple of the size of its mesh axes.

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
      UsageError: it is mapped, and no mesh holds here.
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
    """The PartitionSpec of an array with these axes, one entry for each.

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
    """The sharding of an array with these axes. Their sizes, if given, are not checked.

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
      UsageError: no mesh holds here.
      IllegalMapping: two of the axes are mapped to the same mesh axis.
      UnknownMeshAxis: one is mapped to an axis that the mesh does not have.
    """
    found = require_mesh(mesh)
    spec = spec_of(_named(axis), mapping_or_current(mapping) or {}, mesh=found)
    return NamedSharding(found, spec)


def name_of(axis: object) -> str:
    """The name of an axis that may be given by its name.

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
