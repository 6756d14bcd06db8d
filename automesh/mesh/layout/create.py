"""`create_mesh`: makes a `jax.sharding.Mesh` of sizes and names, on one host or many (jax).

The parameters and their defaults are those of eformer's `create_mesh` (eformer 0.0.101,
`escale.mesh.creation`); `automesh.mesh.layout.devices` lays the axes out on devices.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError, WrongType, check_type
from automesh.mesh.axes import DEFAULT_AXES, MeshAxis, format_mesh
from automesh.mesh.granules import LocatedDevice, by_slice, granules_of
from automesh.mesh.infer import infer_sizes
from automesh.mesh.layout.devices import AxisTypes, axis_types_for, create_mesh_for
from automesh.mesh.layout.hosts import calculate_host_mesh_shape
from automesh.mesh.names import as_names, check_names
from automesh.mesh.shape import as_sizes

DEFAULT_DIMS = (1, -1, 1, 1, 1)
_LOG = logging.getLogger(__name__)
_GRANULES = "granules (TPU slices or, elsewhere, processes)"


def create_mesh(
    axis_dims: Sequence[int] = DEFAULT_DIMS,
    axis_names: Sequence[str] = DEFAULT_AXES,
    dcn_mesh_dims: Sequence[int] | None = None,
    should_sort_granules_by_key: bool = True,
    allow_split_physical_axes: bool = True,
    backend: str | None = None,
    use_jax: bool = False,
    axis_types: AxisTypes = None,
) -> Mesh:
    """Makes a mesh of `axis_dims` on all devices; the same arguments give the same object.

    If the devices form several granules (TPU slices or, elsewhere, processes), these are arranged
    along `dcn_mesh_dims`, which are the outer part of each axis: they never change the shape of the
    mesh. By default, slices are arranged along the first axis that they divide, and processes along
    the leading axes (`calculate_host_mesh_shape`). `MEGASCALE_NUM_SLICES` is not read, since the
    devices know their slices.

    Args:
      axis_dims: devices along each axis, in all granules together; one may be -1.
      axis_names: a name for each size.
      dcn_mesh_dims: granules along each axis; one may be -1. With one granule it has no effect, and
        a log record of level WARNING says so if it asked for more; a -1 that cannot be inferred is
        an error there, too.
      should_sort_granules_by_key: order granules by slice or process index, not by the place of
        their first device in `jax.devices()`.
      allow_split_physical_axes: let one physical axis of a TPU's torus serve several mesh axes.
      backend: `cpu`, `gpu` or `tpu`; default: jax's default backend.
      use_jax: lay out with `jax.make_mesh`, if there is one granule; it decides by itself whether
        to split physical axes. With several it has no effect, which is logged, too.
      axis_types: `jax.sharding.AxisType`s or the words auto, explicit, manual: one for each axis or
        one for all. Default: Auto, with `use_jax`, too.

    Returns:
      A mesh of shape `axis_dims` with the -1 filled in. It is kept for the next call with the
      same arguments and the same devices.

    Raises:
      UsageError: sizes, names, devices and granules do not fit each other.
      WrongType: an argument of the wrong type; also a `TypeError`.

    Example:
      >>> dict(create_mesh((2, -1), ("data", "model")).shape)
      {'data': 2, 'model': 4}
      >>> create_mesh().axis_names
      ('dp', 'fsdp', 'ep', 'tp', 'sp')
    """
    return mesh_on(
        devices_of(backend),
        axis_dims,
        axis_names,
        dcn_mesh_dims=dcn_mesh_dims,
        sort_granules=should_sort_granules_by_key,
        allow_split_physical_axes=allow_split_physical_axes,
        use_jax=use_jax,
        axis_types=axis_types,
    )


def mesh_on(
    devices: Sequence[LocatedDevice],
    axis_dims: Sequence[int],
    axis_names: Sequence[str],
    *,
    dcn_mesh_dims: Sequence[int] | None = None,
    sort_granules: bool = True,
    allow_split_physical_axes: bool = True,
    use_jax: bool = False,
    axis_types: AxisTypes = None,
) -> Mesh:
    """Makes a mesh as `create_mesh` does, on the given devices.

    Raises:
      UsageError, WrongType: as `create_mesh`.

    Example:
      >>> mesh_on(jax.devices()[:4], (2, 2), ("dp", "tp")).devices.shape
      (2, 2)
    """
    names = as_names(axis_names, "`axis_names`")
    check_names(names, ())
    dims = _one_each(axis_dims, names, "axis_dims")
    dcn = None if dcn_mesh_dims is None else _one_each(dcn_mesh_dims, names, "dcn_mesh_dims")
    for flag, argument in (
        (sort_granules, "should_sort_granules_by_key"),
        (allow_split_physical_axes, "allow_split_physical_axes"),
        (use_jax, "use_jax"),
    ):
        check_type(flag, bool, f"`{argument}` must be a bool", hint="use True or False")
    made = _cached(
        tuple(devices),
        dims,
        names,
        dcn,
        axis_types_for(axis_types, names),
        sort_granules,
        allow_split_physical_axes,
        use_jax,
    )
    # Checked here, since the cached part must not depend on the messages.
    for note in made.notes:
        _LOG.warning("%s", note)
    return made.mesh


def devices_of(backend: str | None) -> list[Any]:
    """Returns all devices of a backend, as jax orders them.

    Args:
      backend: `cpu`, `gpu` or `tpu`; None is jax's default backend.

    Raises:
      UsageError: jax has no such backend here.

    Example:
      >>> devices_of("cpu")[0].platform
      'cpu'
    """
    if backend is not None:
        check_type(backend, str, "`backend` must be a string", hint="use cpu, gpu or tpu")
    try:
        return jax.devices(backend)
    except RuntimeError as error:
        raise UsageError(
            f"jax has no backend `{backend or 'default'}` here: {str(error).splitlines()[0]}",
            hint="JAX_PLATFORMS must name it, and its plugin must be installed",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _CreatedMesh:
    """A cached mesh with the notes that each request for it repeats.

    Attributes:
      notes: arguments without effect, a sentence each.
    """

    mesh: Mesh
    notes: tuple[str, ...]


@functools.lru_cache(maxsize=128)
def _cached(
    devices: tuple[LocatedDevice, ...],
    dims: tuple[int, ...],
    names: tuple[str, ...],
    dcn: tuple[int, ...] | None,
    types: tuple[AxisType, ...],
    sort_granules: bool,
    allow_split_physical_axes: bool,
    use_jax: bool,
) -> _CreatedMesh:
    granules = granules_of(devices, sort=sort_granules)
    sizes = _inferred(dims, len(devices), "axis_dims", what="devices")
    outer = _outer(sizes, granules, dcn)
    notes = _without_effect(outer, dcn, granules=len(granules), use_jax=use_jax)
    axes = [
        MeshAxis(name=name, ici=size // across, dcn=across)
        for name, size, across in zip(names, sizes, outer, strict=True)
    ]
    if use_jax and len(granules) == 1:
        return _CreatedMesh(mesh=_by_jax(axes, devices, types), notes=notes)
    mesh = create_mesh_for(
        axes,
        devices=devices,
        axis_types=types,
        sort_granules=sort_granules,
        allow_split_physical_axes=allow_split_physical_axes,
    )
    return _CreatedMesh(mesh=mesh, notes=notes)


def _without_effect(
    outer: tuple[int, ...], dcn: tuple[int, ...] | None, *, granules: int, use_jax: bool
) -> tuple[str, ...]:
    """Lists arguments without effect, a sentence each."""
    notes: list[str] = []
    asked = dcn and math.prod(size for size in dcn if size != -1) > 1
    if asked and granules == 1:
        notes.append(f"dcn_mesh_dims {dcn} has no effect: the devices form one granule")
    if use_jax and granules > 1:
        notes.append(
            f"use_jax has no effect: the devices form {granules} {_GRANULES}, which jax.make_mesh "
            f"does not lay along dcn_mesh_dims {outer}"
        )
    return tuple(notes)


def _one_each(sizes: Sequence[int], names: Sequence[str], what: str) -> tuple[int, ...]:
    try:
        numbers = as_sizes(sizes, f"`{what}`")
    except WrongType:
        raise
    except UsageError as error:
        raise UsageError(f"`{what}`: {error.message}", hint=error.hint) from None
    if len(numbers) != len(names):
        raise UsageError(
            f"`{what}` {numbers} has {len(numbers)} sizes for the {len(names)} axes {list(names)}",
            hint="give a size for each axis; 1 for an axis that is not used",
        )
    return numbers


def _inferred(sizes: tuple[int, ...], total: int, argument: str, *, what: str) -> tuple[int, ...]:
    try:
        return infer_sizes(sizes, total, what=what)
    except UsageError as error:
        raise UsageError(
            f"`{argument}`: {error.message}",
            hint=f"they must multiply to {total}, and one of them may be -1",
        ) from None


def _outer(
    sizes: tuple[int, ...], granules: Sequence[Sequence[LocatedDevice]], dcn: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Returns the number of granules along each axis."""
    count = len(granules)
    if count == 1 and (dcn is None or -1 not in dcn):
        return (1,) * len(sizes)
    if dcn is not None:
        return _as_asked(sizes, _inferred(dcn, count, "dcn_mesh_dims", what=_GRANULES))
    if not by_slice([device for granule in granules for device in granule]):
        inside = calculate_host_mesh_shape(sizes, len(granules[0]), count)
        return tuple(size // part for size, part in zip(sizes, inside, strict=True))
    carrier = next((axis for axis, size in enumerate(sizes) if size % count == 0), None)
    if carrier is None:
        raise UsageError(
            f"none of the axes of mesh {sizes} is a multiple of the {count} slices",
            hint="say with `dcn_mesh_dims` along which axes the slices lie",
        )
    return tuple(count if axis == carrier else 1 for axis in range(len(sizes)))


def _as_asked(sizes: tuple[int, ...], dcn: tuple[int, ...]) -> tuple[int, ...]:
    for axis, (size, across) in enumerate(zip(sizes, dcn, strict=True)):
        if size % across:
            raise UsageError(
                f"`dcn_mesh_dims` {dcn} asks for {across} granules along axis {axis} of mesh "
                f"{sizes}, whose size {size} is not a multiple of that",
                hint="`axis_dims` are sizes over all granules; `dcn_mesh_dims` must divide them",
            )
    return dcn


def _by_jax(axes: Sequence[MeshAxis], devices: Sequence[Any], types: tuple[AxisType, ...]) -> Mesh:
    sizes, names = tuple(axis.size for axis in axes), tuple(axis.name for axis in axes)
    try:
        return jax.make_mesh(sizes, names, axis_types=types, devices=devices)
    except (ValueError, NotImplementedError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"jax.make_mesh cannot lay mesh `{format_mesh(axes)}` out on these devices: {reason}",
            hint="leave `use_jax` out",
        ) from error
