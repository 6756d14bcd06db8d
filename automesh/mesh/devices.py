"""The jax half of `automesh.mesh`: lays axes out on devices, to run and to compile alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.mesh.granules import Located, by_slice, granules_of
from automesh.mesh.shape import MeshShape, resolve_shape

_AXIS_TYPES = {
    "auto": AxisType.Auto,
    "explicit": AxisType.Explicit,
    "manual": AxisType.Manual,
}


def create_mesh_for(
    axes: Sequence[MeshAxis],
    *,
    devices: Sequence[Located] | None = None,
    axis_types: Sequence[str] = (),
) -> Mesh:
    """Lays axes out on devices with `jax.experimental.mesh_utils`.

    A mesh without a `dcn.` part may be smaller than the devices: it takes the first ones of the
    first granule.

    Args:
      axes: in the order of the mesh; the innermost (last) one gets the best-connected devices.
      devices: default: all devices of the default backend.
      axis_types: auto, explicit or manual for each axis, or one for all; empty means Auto.

    Raises:
      UsageError: the sizes do not fit the devices or their granules, or an axis type is unknown.
    """
    names = tuple(axis.name for axis in axes)
    if not axes or len(set(names)) != len(names):
        raise UsageError(f"a mesh needs distinct axis names, got {list(names)}")
    types = _axis_types(axis_types, names)
    granules = granules_of(jax.devices() if devices is None else devices)
    return Mesh(_arrange(axes, granules), names, axis_types=types)


def create_mesh_of_shape(
    shape: MeshShape,
    names: Sequence[str],
    *,
    devices: Sequence[Located] | None = None,
    axis_types: Sequence[str] = (),
) -> Mesh:
    """Infers every -1 of `shape` and lays it out on all the devices.

    Raises:
      UsageError: the sizes do not multiply to the number of devices; see `create_mesh_for`.
    """
    chosen = jax.devices() if devices is None else list(devices)
    resolved = resolve_shape(shape, num_devices=len(chosen), num_granules=len(granules_of(chosen)))
    axes = [
        MeshAxis(name=name, ici=ici, dcn=dcn)
        for name, ici, dcn in zip(
            names, resolved.ici_mesh_shape, resolved.dcn_mesh_shape, strict=True
        )
    ]
    return create_mesh_for(axes, devices=chosen, axis_types=axis_types)


def arrange_granule(sizes: Sequence[int], devices: Sequence[Located], *, name: str) -> np.ndarray:
    """The devices of one granule in the shape `sizes`, as in every mesh made here.

    Args:
      name: of the mesh, for the error.

    Raises:
      UsageError: jax cannot lay the sizes out.
    """
    return _layout(
        name,
        lambda: mesh_utils.create_device_mesh(
            tuple(sizes), devices, allow_split_physical_axes=True
        ),
    )


def count_hosts() -> int:
    """Number of jax processes in the job."""
    return jax.process_count()


def this_host() -> int:
    """Index of this process among the job's."""
    return jax.process_index()


def _axis_types(wanted: Sequence[str], names: Sequence[str]) -> tuple[AxisType, ...]:
    spread = tuple(wanted) if len(wanted) > 1 else tuple(wanted or ("auto",)) * len(names)
    if len(spread) != len(names):
        raise UsageError(
            f"got {len(spread)} axis types {list(spread)} for the {len(names)} axes {list(names)}",
            hint="give one axis type for each axis, or one for all",
        )
    unknown = [name for name in spread if name.strip().lower() not in _AXIS_TYPES]
    if unknown:
        raise UsageError(f"`{unknown[0]}` is not an axis type; use {', '.join(_AXIS_TYPES)}")
    return tuple(_AXIS_TYPES[name.strip().lower()] for name in spread)


def _arrange(axes: Sequence[MeshAxis], granules: Sequence[Sequence[Located]]) -> np.ndarray:
    ici = tuple(axis.ici for axis in axes)
    dcn = tuple(axis.dcn for axis in axes)
    inside, across = math.prod(ici), math.prod(dcn)
    size, text = len(granules[0]), format_mesh(axes)
    if across == 1 and inside <= size and (inside < size or len(granules) == 1):
        return arrange_granule(ici, granules[0][:inside], name=text)
    if across != len(granules):
        raise UsageError(
            f"mesh `{text}` spans {across} granules, but the devices form {len(granules)} "
            f"(a granule is a TPU slice or, elsewhere, a process)",
            hint="the `dcn.` parts must multiply to the number of granules",
        )
    if inside != size:
        each = " in each granule" if across > 1 else ""
        raise UsageError(f"mesh `{text}` needs {inside} devices{each}, but there are {size}")
    flat = [device for granule in granules for device in granule]
    return _layout(
        text,
        lambda: mesh_utils.create_hybrid_device_mesh(
            ici,
            dcn,
            flat,
            process_is_granule=not by_slice(flat),
            allow_split_physical_axes=True,
        ),
    )


def _layout(text: str, create: Callable[[], np.ndarray]) -> np.ndarray:
    try:
        return create()
    # What mesh_utils raises where the devices are no box, or the box has no such factorization.
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise _no_layout(text, str(error).splitlines()[0]) from error
    # jax 0.10 miscounts the factors of 28, 44, 52 ... chips, then trips over having found no way.
    except TypeError as error:
        if "NoneType" not in str(error):
            raise
        raise _no_layout(text, "it finds no way to split their dimensions") from error


def _no_layout(text: str, reason: str) -> UsageError:
    return UsageError(f"jax cannot lay mesh `{text}` out on these devices: {reason}")
