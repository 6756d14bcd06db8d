"""Finds where jax's mesh code puts mesh axes on a torus, with stand-ins for the devices (jax)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from automesh.errors import UsageError
from automesh.hardware.fabric.fabric import AxisSpan, Crooked, Layouts, Wound
from automesh.hardware.fabric.placement import places_along
from automesh.hardware.fabric.torus import box_of, reach_of_box_or_rings
from automesh.hardware.slices import wraps_of
from automesh.mesh.layout.devices import arrange_granule

if TYPE_CHECKING:
    from automesh.worker.messages import LayoutJob

Ints = NDArray[np.int64]
Spans = tuple[AxisSpan, ...]
_HOST = (2, 2, 1)  # Chips of a host: jax lists the devices of a slice host by host.
# For these kinds jax's layout depends on the last size of a mesh, even if it is 1.
_BY_LAST_SIZE = ("TPU v2", "TPU v3")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDevice:
    """The attributes of a TPU device that jax's mesh code reads."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int


def fake_devices(
    device_kind: str,
    torus: tuple[int, ...],
    devices_per_chip: int,
    host: tuple[int, ...] = _HOST,
) -> tuple[LayoutDevice, ...]:
    """Returns the devices of one slice in the order in which jax lists them.

    The order (hosts, then z, y, x inside each, the cores of a chip side by side) and the ids are
    those of libtpu's compile-only topologies.

    Args:
      host: number of chips of one host along each of three dimensions.
    """
    box = (*torus, 1, 1)[:3]
    host = tuple(min(have, size) for have, size in zip(host, box, strict=True))
    hosts = tuple(-(-size // have) for size, have in zip(box, host, strict=True))
    found: list[LayoutDevice] = []
    for z, y, x in itertools.product(*(range(size) for size in reversed(box))):
        cell = tuple(at // have for at, have in zip((x, y, z), host, strict=True))
        chip = x + box[0] * (y + box[1] * z)
        for core in range(devices_per_chip):
            found.append(
                LayoutDevice(
                    id=chip * devices_per_chip + core,
                    platform="tpu",
                    device_kind=device_kind,
                    process_index=cell[0] + hosts[0] * (cell[1] + hosts[1] * cell[2]),
                    slice_index=0,
                    coords=(x, y, z),
                    core_on_chip=core,
                )
            )
    return tuple(sorted(found, key=lambda device: device.process_index))


def lay_out(job: LayoutJob) -> Layouts:
    """Lays out every shape of the job, and finds the physical dimensions of each axis."""
    if not job.torus:
        return Layouts(shapes=job.shapes, spans=tuple(((),) * len(one) for one in job.shapes))
    torus = _Torus(job)
    shapes: list[tuple[int, ...]] = []
    spans: list[tuple[Spans, ...]] = []
    crooked: list[Crooked] = []
    refused: list[tuple[tuple[int, ...], str]] = []
    wound: list[Wound] = []
    for shape in job.shapes:
        places = torus.places(shape)
        if isinstance(places, str):
            refused.append((shape, places))
            continue
        straight = spans_of(places)
        shapes.append(shape)
        spans.append(straight or ((),) * len(shape))
        if straight is None:
            crooked += _crooked(shape, places, job)
        if straight is None or not np.array_equal(places_along(straight, shape), places):
            wound.append(_wound(shape, places))
    return Layouts(
        shapes=tuple(shapes),
        spans=tuple(spans),
        crooked=tuple(crooked),
        refused=tuple(refused),
        wound=tuple(wound),
    )


class _Torus:
    """The devices of one slice, and the layouts that were made on them."""

    def __init__(self, job: LayoutJob) -> None:
        self._devices = fake_devices(job.device_kind, job.torus, job.devices_per_chip)
        self._coords = np.zeros((len(self._devices), 4), np.int64)
        for device in self._devices:
            self._coords[device.id] = (*device.coords, device.core_on_chip)
        self._keeps_ones = job.device_kind in _BY_LAST_SIZE
        self._known: dict[tuple[int, ...], Ints | str] = {}

    def places(self, shape: tuple[int, ...]) -> Ints | str:
        """Returns an array [*shape, 4] with x, y, z and core of the device at each point; or why
        jax refuses."""
        key = shape if self._keeps_ones else tuple(size for size in shape if size > 1)
        if key not in self._known:
            self._known[key] = self._made(key)
        known = self._known[key]
        return known if isinstance(known, str) else known.reshape(*shape, 4)

    def _made(self, shape: tuple[int, ...]) -> Ints | str:
        # jax cannot lay out a mesh without axes, which is one device.
        axes = shape or (1,)
        name = "x".join(map(str, axes))
        try:
            mesh = arrange_granule(axes, self._devices[: math.prod(shape)], name=name)
        except UsageError as refusal:
            return refusal.message
        ids = np.array([device.id for device in mesh.flat], np.int64)
        return self._coords[ids].reshape(*shape, 4)


def spans_of(places: Ints) -> tuple[Spans, ...] | None:
    """Returns the spans of the axes, if each step along an axis has the same direction everywhere
    and the devices along it form a regular box; else None.

    Args:
      places: [*shape, 4]: x, y, z and core of the device at each point of the mesh.
    """
    origin = places.reshape(-1, 4)[0]
    axes = places.ndim - 1
    steps: list[Ints] = []
    total = np.broadcast_to(origin, places.shape)
    for axis in range(axes):
        line = places[tuple(slice(None) if one == axis else 0 for one in range(axes))] - origin
        steps.append(line)
        total = total + line.reshape(*(-1 if one == axis else 1 for one in range(axes)), 4)
    if not np.array_equal(total, places):
        return None
    spans = [box_of(line) for line in steps]
    return None if None in spans else tuple(span for span in spans if span is not None)


def _wound(shape: tuple[int, ...], places: Ints) -> Wound:
    return Wound(
        shape=shape, places=tuple(tuple(map(int, place)) for place in places.reshape(-1, 4))
    )


def _crooked(shape: tuple[int, ...], places: Ints, job: LayoutJob) -> list[Crooked]:
    """Returns every set of axes of a shape that is no product of spans."""
    wraps = job.wraps or wraps_of(job.device_kind, job.torus)
    real = [axis for axis, size in enumerate(shape) if size > 1]
    found: list[Crooked] = []
    for number in range(1, len(real) + 1):
        for axes in itertools.combinations(real, number):
            last = range(len(shape) - len(axes), len(shape))
            groups = np.moveaxis(places, axes, tuple(last)).reshape(
                -1, math.prod(shape[axis] for axis in axes), 4
            )
            found.append(
                Crooked(
                    shape=shape,
                    axes=axes,
                    reach=reach_of_box_or_rings(list(groups), job.torus, wraps),
                )
            )
    return found
