"""Devices that are not here: what is known of them without asking jax."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.hardware.fabric import Fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """Hardware that a target names.

    Attributes:
      selector: name that a rule is written for.
      device_kind: as jax calls one of the devices; empty if the table of chips has no name.
      device_memory_bytes: what the compiler lets one device use, or all it has where that is not
        known.
      num_hosts: of all granules together; each is one jax process.
      topology: for compile-only clients: `v5e:4x4`; empty for GPUs.
      chip_config: for compile-only clients: `megacore` where two cores are one device.
      host: for compile-only clients: chips of one host along each of three dimensions; empty for
        GPUs.
    """

    selector: str
    fabric: Fabric
    device_kind: str
    device_memory_bytes: int
    num_hosts: int
    topology: str = ""
    chip_config: str = ""
    host: tuple[int, ...] = ()

    @property
    def platform(self) -> str:
        return self.fabric.chip.platform

    @property
    def num_devices(self) -> int:
        return self.fabric.num_devices
