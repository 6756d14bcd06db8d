"""The jax half of `automesh.mesh`: lays axes out on devices, for running and compiling."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.mesh.axis_types import as_axis_types
from automesh.mesh.granules import LocatedDevice, as_devices, granules_of
from automesh.mesh.infer import resolve_shape, spread_over_granules
from automesh.mesh.layout.rings import ring_of, rings_on
from automesh.mesh.shape import MeshShape

AxisTypes = AxisType | str | Sequence[AxisType | str] | None

_AXIS_TYPES = {
    "auto": AxisType.Auto,
    "explicit": AxisType.Explicit,
    "manual": AxisType.Manual,
}


class SpreadGranulesWarning(UserWarning):
    """Warns that no single axis of a plain mesh shape can span all granules, so that several do."""


def create_mesh_for(
    axes: Sequence[MeshAxis],
    *,
    devices: Sequence[LocatedDevice] | None = None,
    axis_types: AxisTypes = None,
    sort_granules: bool = True,
    allow_split_physical_axes: bool = True,
) -> Mesh:
    """Lays axes out on devices: the one layout of run time, ahead-of-time compiles and cost model.

    Inside a granule it is that of `jax.experimental.mesh_utils`, except for the rings of
    `mesh.layout.rings`. Granule g is the block at `unravel_index(g, dcn sizes)`, as in jax's hybrid
    meshes. A mesh without a `dcn.` part may be smaller than the devices: it takes the first ones of
    the first granule.

    Args:
      axes: in the order of the mesh; the innermost (last) one gets the best-connected devices.
      devices: default: all devices of the default backend.
      axis_types: see `axis_types_for`.
      sort_granules: by slice or process number, not by their first appearance in `devices`.
      allow_split_physical_axes: let mesh axes share a dimension of a torus.

    Raises:
      UsageError: the sizes do not fit the devices or their granules, or an axis type is unknown.

    Example:
      >>> dict(create_mesh_for([MeshAxis(name="dp", ici=2), MeshAxis(name="tp", ici=4)]).shape)
      {'dp': 2, 'tp': 4}
    """
    names = tuple(axis.name for axis in axes)
    if not axes or len(set(names)) != len(names):
        raise UsageError(f"a mesh needs distinct axis names, got {list(names)}")
    types = axis_types_for(axis_types, names)
    chosen = attached_devices() if devices is None else as_devices(devices)
    granules = granules_of(chosen, sort=sort_granules)
    return Mesh(_arrange(axes, granules, allow_split_physical_axes), names, axis_types=types)


def create_mesh_of_shape(
    shape: MeshShape,
    names: Sequence[str],
    *,
    devices: Sequence[LocatedDevice] | None = None,
    axis_types: AxisTypes = None,
) -> Mesh:
    """Infers every -1 of `shape` and lays it out on all the devices.

    Warns with `SpreadGranulesWarning` if a plain shape had to be spread over granules along
    several axes.

    Raises:
      UsageError: the sizes do not multiply to the number of devices; see `create_mesh_for`.

    Example:
      >>> create_mesh_of_shape((2, -1), ("data", "model")).shape["data"]
      2
    """
    chosen = attached_devices() if devices is None else as_devices(devices)
    resolved = resolve_shape(shape, num_devices=len(chosen), num_granules=len(granules_of(chosen)))
    axes = [
        MeshAxis(name=name, ici=ici, dcn=dcn)
        for name, ici, dcn in zip(
            names, resolved.ici_mesh_shape, resolved.dcn_mesh_shape, strict=True
        )
    ]
    spread = spread_over_granules(shape, resolved)
    if spread:
        warnings.warn(
            f"the axes {', '.join(names[axis] for axis in spread)} of mesh {shape} all span "
            f"granules (slices or nodes): it is laid out as `{format_mesh(axes)}`; say so with a "
            f"HybridMeshShape{(resolved.ici_mesh_shape, resolved.dcn_mesh_shape)}",
            SpreadGranulesWarning,
            stacklevel=3,
        )
    return create_mesh_for(axes, devices=chosen, axis_types=axis_types)


def arrange_granule(
    sizes: Sequence[int],
    devices: Sequence[LocatedDevice],
    *,
    name: str,
    allow_split_physical_axes: bool = True,
) -> np.ndarray:
    """Arranges the devices of one granule in the shape `sizes`, as in every mesh of this module.

    Args:
      name: of the mesh, for the error.

    Raises:
      UsageError: jax cannot lay the sizes out.

    Example:
      >>> arrange_granule((2, 4), jax.devices()[:8], name="tp").shape
      (2, 4)
    """
    try:
        ring = ring_of(sizes, devices) if allow_split_physical_axes else None
        if ring is not None:
            grid = mesh_utils.create_device_mesh(ring.grid, devices)
            return rings_on(grid, ring).reshape(tuple(sizes))
        return mesh_utils.create_device_mesh(
            tuple(sizes), devices, allow_split_physical_axes=allow_split_physical_axes
        )
    # What mesh_utils raises where the devices are no box, or the box has no such factorization.
    except (ValueError, NotImplementedError) as error:
        raise _no_layout(name, str(error).splitlines()[0]) from error
    # Its message lists all devices.
    except AssertionError as error:
        raise _no_layout(name, "they do not fill a box of their torus") from error
    # jax 0.10 miscounts the factors of 28, 44, 52 ... chips, and then fails as it finds no layout.
    except TypeError as error:
        if "NoneType" not in str(error):
            raise
        raise _no_layout(name, "it finds no way to split their dimensions") from error


def axis_types_for(wanted: AxisTypes, names: Sequence[str]) -> tuple[AxisType, ...]:
    """Returns one jax axis type for each axis; Auto by default.

    Args:
      wanted: auto, explicit or manual (in any case, or as `jax.sharding.AxisType`), one for each
        axis or one for all; None and an empty sequence mean Auto.
      names: names of the axes.

    Raises:
      WrongType: neither a string nor an AxisType.
      UsageError: an unknown word, or a number of types that is neither 1 nor that of the axes.

    Example:
      >>> axis_types_for("explicit", ("dp", "tp")) == (AxisType.Explicit, AxisType.Explicit)
      True
    """
    return tuple(_AXIS_TYPES[word] for word in as_axis_types(wanted, names))


def attached_devices() -> list[Any]:
    """Returns all devices of the default backend, also those of other processes."""
    return jax.devices()


def count_hosts() -> int:
    """Counts the jax processes in the job."""
    return jax.process_count()


def this_host() -> int:
    """Returns the index of this process in the job."""
    return jax.process_index()


def _arrange(
    axes: Sequence[MeshAxis], granules: Sequence[Sequence[LocatedDevice]], split: bool
) -> np.ndarray:
    ici = tuple(axis.ici for axis in axes)
    dcn = tuple(axis.dcn for axis in axes)
    inside, across = math.prod(ici), math.prod(dcn)
    size, text = len(granules[0]), format_mesh(axes)
    if across == 1 and inside <= size and (inside < size or len(granules) == 1):
        chosen = granules[0][:inside]
        return arrange_granule(ici, chosen, name=text, allow_split_physical_axes=split)
    if across != len(granules):
        raise UsageError(
            f"mesh `{text}` spans {across} granules, but the devices form {len(granules)} "
            f"(a granule is a TPU slice or, elsewhere, a process)",
            hint="the `dcn.` parts must multiply to the number of granules",
        )
    if inside != size:
        each = " in each granule" if across > 1 else ""
        raise UsageError(f"mesh `{text}` needs {inside} devices{each}, but there are {size}")
    blocks = np.empty((across, inside), dtype=object)
    for number, granule in enumerate(granules):
        one = arrange_granule(ici, granule, name=text, allow_split_physical_axes=split)
        blocks[number] = one.ravel()
    return _interleave(blocks, ici, dcn)


def _interleave(blocks: np.ndarray, ici: Sequence[int], dcn: Sequence[int]) -> np.ndarray:
    """Joins the blocks of the granules, [granules, devices], to one grid.

    Along every axis the granule is the major part.
    """
    rank = len(ici)
    pairs = [axis + part * rank for axis in range(rank) for part in (0, 1)]
    grid = blocks.reshape(*dcn, *ici).transpose(pairs)
    return grid.reshape([outer * inner for outer, inner in zip(dcn, ici, strict=True)])


def _no_layout(text: str, reason: str) -> UsageError:
    return UsageError(
        f"jax cannot lay mesh `{text}` out on these devices: {reason}",
        hint="use other sizes, or pass `devices=` that fill a box of the torus",
    )
