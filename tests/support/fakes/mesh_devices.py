"""Stand-ins for devices that are not here: all that jax's mesh code and ours look at."""

from __future__ import annotations

from dataclasses import dataclass, replace

from automesh.program.absent.layout import LayoutDevice, fake_devices


@dataclass(frozen=True)
class Hosted:
    """A GPU, or a virtual CPU device, of a process."""

    id: int
    platform: str
    device_kind: str
    process_index: int


def slices(kind: str, torus: tuple[int, ...], number: int, *, cores: int = 1) -> list[LayoutDevice]:
    """The devices of several TPU slices, slice by slice as jax lists them."""
    one = fake_devices(kind, torus, cores)
    return [
        replace(device, slice_index=index, id=device.id + index * len(one))
        for index in range(number)
        for device in one
    ]


def nodes(number: int, each: int, *, platform: str = "gpu") -> list[Hosted]:
    """The devices of several processes, in the order of their ids."""
    kind = {"gpu": "NVIDIA H100 80GB HBM3", "cpu": "cpu"}[platform]
    return [
        Hosted(id=each * node + index, platform=platform, device_kind=kind, process_index=node)
        for node in range(number)
        for index in range(each)
    ]
