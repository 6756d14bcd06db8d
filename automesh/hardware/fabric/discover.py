"""Finds how the devices of a target are wired: from its name, or from the attached devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from automesh.errors import UsageError
from automesh.hardware.chips import chip_for
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.slices import is_flat, wraps_of
from automesh.hardware.targets import Described, Target
from automesh.mesh.granules import LocatedDevice, granules_of
from automesh.platforms import platform_named


class PlacedDevice(LocatedDevice, Described, Protocol):
    """A device that says where it is; `automesh.program.nouns.Device` fits."""

    @property
    def coords(self) -> tuple[int, ...]: ...


def fabric_of(target: Target, devices: Sequence[PlacedDevice]) -> Fabric:
    """Returns the fabric of a target.

    Args:
      devices: all devices as jax reports them; unused if the target's devices are absent.

    Raises:
      UsageError: the devices are of several kinds, or they do not say where they are.
    """
    return target.absent.fabric if target.absent else attached_fabric(devices)


def attached_fabric(devices: Sequence[PlacedDevice]) -> Fabric:
    """Returns the fabric of attached devices.

    A TPU slice is the box that its coordinates span; all GPUs of a process are on one switch;
    virtual CPU devices share the memory of their host.

    Raises:
      UsageError: see `fabric_of`.
    """
    granules = granules_of(devices)
    first = devices[0]
    chip = chip_for(first.kind, first.platform)
    each = len(granules[0])
    fabric = Fabric(
        kind=platform_named(first.platform).fabric,
        chip=chip,
        num_granules=len(granules),
        granule_devices=each,
    )
    if fabric.kind != "torus":
        return fabric
    torus = _box(granules[0])
    return replace(
        fabric,
        torus=torus,
        wraps=wraps_of(first.kind, torus),
        devices_per_chip=each // math.prod(torus),
    )


def _box(devices: Sequence[PlacedDevice]) -> tuple[int, ...]:
    """Counts the chips along each dimension of the box that the devices of a slice fill."""
    coords = [device.coords for device in devices]
    if not all(coords):
        raise UsageError(
            f"devices of kind `{devices[0].kind}` do not say where they are in their slice",
            hint="without them the links of a mesh are unknown; upgrade jax or libtpu",
        )
    sizes = tuple(max(along) - min(along) + 1 for along in zip(*coords, strict=True))
    if len(devices) % math.prod(sizes):
        raise UsageError(
            f"{len(devices)} devices do not fill a box of {'x'.join(map(str, sizes))} chips",
            hint="use all devices of a slice",
        )
    return sizes[:2] if is_flat(devices[0].kind) else sizes
