"""Groups devices that share a fast network: one rule for every platform (no jax)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

from automesh.errors import UsageError, WrongType, kind_of


class LocatedDevice(Protocol):
    """A device that says its granule; jax devices and `automesh.program.nouns.Device` both fit."""

    @property
    def platform(self) -> str: ...
    @property
    def process_index(self) -> int: ...


D = TypeVar("D", bound=LocatedDevice)


def as_devices(devices: object) -> list[Any]:
    """Checks what a caller gave as the devices of a mesh, and makes it a list.

    Raises:
      WrongType: no sequence, or an element that is no device.
      UsageError: no devices, or one of them twice.

    Example:
      >>> import jax
      >>> [device.id for device in as_devices(jax.devices()[:2])]
      [0, 1]
    """
    listed = list(cast("Iterable[Any]", devices)) if isinstance(devices, Iterable) else [devices]
    for one in listed:
        if not hasattr(one, "platform") or not hasattr(one, "process_index"):
            raise WrongType(
                f"`devices` must be a sequence of jax devices, got {kind_of(one)}: {one!r}",
                hint="give some of `jax.devices()`, in a flat list; an array by `.flat`",
            )
    if not isinstance(devices, Iterable):
        raise WrongType(
            f"`devices` must be a sequence of jax devices, got one device: {devices!r}",
            hint="give it in a list",
        )
    seen: set[Any] = set()
    for one in listed:
        if one in seen:
            raise UsageError(
                f"a mesh has every device once, got {one} twice among {len(listed)} devices",
                hint="give distinct devices, for example some of `jax.devices()`",
            )
        seen.add(one)
    return listed


def by_slice(devices: Sequence[LocatedDevice]) -> bool:
    """Whether granules are TPU slices; otherwise they are processes."""
    return devices[0].platform == "tpu"


def granules_of(devices: Sequence[D], *, sort: bool = True) -> tuple[tuple[D, ...], ...]:
    """Groups devices by slice (TPU) or by process; the order inside a group is kept.

    A granule is a distinct key, so a job on slice 1 alone has one granule.

    Args:
      sort: order the granules by key; False leaves them in the order of their first devices.

    Raises:
      UsageError: no devices, several platforms, or granules of different sizes.

    Example:
      >>> import jax
      >>> len(granules_of(jax.devices()))
      1
    """
    if not devices:
        raise UsageError(
            "a mesh needs at least one device, got none",
            hint="leave `devices` out to have all that jax sees",
        )
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise UsageError(
            f"a mesh cannot mix devices of several platforms, got {', '.join(platforms)}",
            hint='give those of one, for example `jax.devices("cpu")`',
        )
    slices = by_slice(devices)
    groups: dict[int, list[D]] = {}
    for device in devices:
        groups.setdefault(granule_key(device, slices=slices), []).append(device)
    sizes = sorted({len(group) for group in groups.values()})
    if len(sizes) > 1:
        least = min(groups, key=lambda key: len(groups[key]))
        raise UsageError(
            f"granules (slices or processes) must have the same number of devices, got {sizes}: "
            f"{'slice' if slices else 'process'} {least} has {sizes[0]}",
            hint="pass `devices=` with as many devices of each granule",
        )
    return tuple(tuple(groups[key]) for key in (sorted(groups) if sort else groups))


def granule_key(device: LocatedDevice, *, slices: bool) -> int:
    """Returns the number of a device's granule: its slice, or else its process."""
    # Some compile-only TPU devices of a single slice have no slice_index, or None.
    return (getattr(device, "slice_index", 0) or 0) if slices else device.process_index
