"""Stand-ins for the devices of a target, for user code that asks for devices (jax).

They are used to rank by estimate if no compile-only client is installed, and for attached devices
in a process without them. Their attributes and order are those of the devices of such clients.
"""

from __future__ import annotations

import re
from typing import Any

from automesh.hardware.absent import AbsentDevices
from automesh.hardware.gpu_configurations import (
    compute_capability,
    known_configurations,
    read_configuration,
)
from automesh.program.absent import layout
from automesh.program.absent.pallas import cores_of

_SLICE_IDS = 100_000  # distance between the ids of devices in different slices


class FakeDevice:
    """A device that has only public attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a device that is not here has no attribute `{name}`")

    def __repr__(self) -> str:
        return f"{self.device_kind}(id={self.id}, not here)"


def fake_devices(one: AbsentDevices) -> tuple[FakeDevice, ...]:
    """Returns the devices of a target, in jax's order."""
    return _tpus(one) if one.platform == "tpu" else _gpus(one)


def _tpus(one: AbsentDevices) -> tuple[FakeDevice, ...]:
    hosts = one.num_hosts // one.num_granules
    in_slice = layout.fake_devices(one.device_kind, one.torus, one.devices_per_chip, host=one.host)
    found: list[FakeDevice] = []
    for granule in range(one.num_granules):
        # The devices of a single absent slice have no slice index.
        is_numbered = one.num_granules > 1 or one.is_attached
        numbered = {"slice_index": granule} if is_numbered else {}
        first = _SLICE_IDS * (granule + 1) if one.num_granules > 1 else 0
        found += [
            FakeDevice(
                id=first + device.id,
                platform="tpu",
                device_kind=one.device_kind,
                process_index=0 if one.is_attached else granule * hosts + device.process_index,
                coords=list(device.coords),
                core_on_chip=device.core_on_chip,
                **{"num_cores": cores_of(one), **numbered, **dict(one.says)},
            )
            for device in in_slice
        ]
    return tuple(found)


def _gpus(one: AbsentDevices) -> tuple[FakeDevice, ...]:
    _, hosts, each = map(int, one.topology.split("x"))
    text = read_configuration(one.gpu) if one.gpu in known_configurations() else ""
    known: dict[str, Any] = {"device_vendor": "NVIDIA Corporation"}
    for name in ("core_count", "shared_memory_per_block_optin"):
        if stated := re.search(rf"{name}: (\d+)", text):
            known[name] = int(stated[1])
    if stated := compute_capability(one.gpu):
        known["compute_capability"] = stated
    return tuple(
        FakeDevice(
            id=number,
            platform="gpu",
            device_kind=one.device_kind,
            process_index=number // each,
            coords=[number // each // hosts, number // each % hosts, number % each],
            slice_index=0,
            partition_index=0,
            fabric_uuid="",
            **{**known, **dict(one.says)},
        )
        for number in range(one.num_devices)
    )
