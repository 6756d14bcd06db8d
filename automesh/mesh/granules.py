"""Which devices share a fast network: one rule for every platform (no jax)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from automesh.errors import UsageError


class Located(Protocol):
    """What tells a device's granule; jax devices and `automesh.program.nouns.Device` both fit."""

    @property
    def platform(self) -> str: ...
    @property
    def process_index(self) -> int: ...


D = TypeVar("D", bound=Located)


def by_slice(devices: Sequence[Located]) -> bool:
    """True if granules are TPU slices, False if they are processes."""
    return devices[0].platform == "tpu"


def granules_of(devices: Sequence[D]) -> tuple[tuple[D, ...], ...]:
    """Groups devices by slice (TPU) or by process, ordered by that key; the order inside is kept.

    A granule is a distinct key, so a job on slice 1 alone has one granule.

    Raises:
      UsageError: no devices, several platforms, or granules of different sizes.
    """
    if not devices:
        raise UsageError("a mesh needs at least one device, got none")
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise UsageError(
            f"a mesh cannot mix devices of several platforms, got {', '.join(platforms)}"
        )
    groups: dict[int, list[D]] = {}
    for device in devices:
        # Some compile-only TPU devices of a single slice have no slice_index.
        key = getattr(device, "slice_index", 0) if by_slice(devices) else device.process_index
        groups.setdefault(key, []).append(device)
    sizes = sorted({len(group) for group in groups.values()})
    if len(sizes) > 1:
        raise UsageError(
            f"granules (slices or processes) must have the same number of devices, got {sizes}",
            hint="pass `devices=` with as many devices of each granule",
        )
    return tuple(tuple(groups[key]) for key in sorted(groups))
