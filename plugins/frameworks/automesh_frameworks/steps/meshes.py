"""Converts the mesh of a plan to that of a framework, which has all of the framework's axes in its
order (jax)."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from automesh.errors import UsageError


def check_names(mesh: Mesh, known: Sequence[str], whose: str) -> None:
    """Checks that the framework has all axes of a mesh with more than one device.

    Args:
      mesh: the mesh of a plan.
      known: the framework's axes.
      whose: the start of the message, "MaxText's mesh".

    Raises:
      UsageError: names the axis.
    """
    for name, size in mesh.shape.items():
        if size > 1 and name not in known:
            raise UsageError(
                f"{whose} has no axis `{name}`; its axes are {', '.join(known)}",
                hint="name axes of the framework's in the search space",
            )


def whole_mesh(
    mesh: Mesh, names: Sequence[str], whose: str, axis_type: AxisType = AxisType.Auto
) -> Mesh:
    """Returns the devices of `mesh` with all axes of a framework, in its order; added axes have
    size 1.

    Args:
      mesh: the mesh of a plan; its axes may be in any order.
      names: the framework's axes.
      whose: the start of the message, "MaxText's mesh".
      axis_type: the type of every axis.

    Raises:
      UsageError: the framework does not have an axis of more than one device.
    """
    check_names(mesh, names, whose)
    wanted = tuple(names)
    order = sorted(
        range(len(mesh.axis_names)),
        key=lambda i: wanted.index(name) if (name := mesh.axis_names[i]) in wanted else -1,
    )
    devices = mesh.devices.transpose(order).reshape([mesh.shape.get(name, 1) for name in wanted])
    return Mesh(devices, wanted, axis_types=(axis_type,) * len(wanted))


def spans_granules() -> bool:
    """Whether the devices belong to more than one slice or node."""
    devices = jax.devices()
    by = "slice_index" if devices[0].platform == "tpu" else "process_index"
    return len({getattr(device, by, 0) for device in devices}) > 1
