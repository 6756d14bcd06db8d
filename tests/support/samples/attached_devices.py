"""Attached accelerators, as a process is told of them that has none."""

from __future__ import annotations

from automesh.hardware.absent import AbsentDevices
from automesh.hardware.chips import chip_for
from automesh.hardware.compilers import attached_devices_of
from automesh.hardware.fabric.fabric import Fabric


def cards(count: int) -> AbsentDevices:
    """GPUs of a kind of which no configuration is shipped."""
    chip = chip_for("NVIDIA L4", "gpu")
    return attached_devices_of(
        Fabric(kind="switch", chip=chip, num_granules=1, granule_devices=count),
        device_kind="NVIDIA L4",
        memory_bytes=22 * 2**30,
        says=(("compute_capability", "8.9"), ("core_count", 58)),
    )


def torus_4x4() -> AbsentDevices:
    """A slice of TPUs that one process drives."""
    fabric = Fabric(
        kind="torus",
        chip=chip_for("TPU v5 lite", "tpu"),
        num_granules=1,
        granule_devices=16,
        torus=(4, 4),
        wraps=(False, False),
    )
    return attached_devices_of(fabric, device_kind="TPU v5 lite", memory_bytes=15 * 2**30, says=())
