"""Devices that are not here: what is known of them without asking jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automesh.hardware.fabric.fabric import Fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentDevices:
    """What a compile-only client of jax is told: sent to workers.

    Attributes:
      device_kind: as jax calls one of the devices.
      num_devices: of all granules together.
      num_hosts: jax processes of all granules together.
      torus: TPU: chips along each dimension of a slice; empty for GPUs.
      wraps: TPU: per dimension, whether its ends are linked; empty for GPUs, and for links that are
        not Google's: the compiler knows no others.
      devices_per_chip: 2 where a chip is two devices.
      topology: TPU: `v5e:4x4`, empty for those that cannot be compiled for; GPU: domains
        of NVLink, hosts of each and devices of each host: `2x1x8`.
      num_granules: slices, or hosts of GPUs.
      chip_config: TPU: `megacore` where two cores are one device; else empty.
      host: TPU: chips of one host along each of three dimensions; empty for GPUs.
      gpu: name of the target configuration in `data/gpus/`; empty for TPUs, and for GPUs that none
        is shipped for: those cannot be compiled for.
      memory_bytes: of one device: of a GPU, since its compiler never says that a program does not
        fit, and of what is attached; 0 for other TPUs, whose compiler does.
      is_attached: this machine has them, but not the process that is told of them, which lowers on
        virtual devices: these stay what user code gets, and speak for them.
      says: what devices that are attached say of themselves, by attribute; see `Device.says`.
    """

    platform: Literal["tpu", "gpu"]
    device_kind: str
    num_devices: int
    num_granules: int
    num_hosts: int
    topology: str
    torus: tuple[int, ...] = ()
    wraps: tuple[bool, ...] = ()
    devices_per_chip: int = 1
    chip_config: str = ""
    host: tuple[int, ...] = ()
    gpu: str = ""
    memory_bytes: int = 0
    # Not in the text by which stored programs are found: nothing is compiled ahead for these.
    is_attached: bool = field(default=False, repr=False)
    says: tuple[tuple[str, int | str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """Hardware that a target names.

    Attributes:
      selector: name that a rule is written for.
      device_kind: as jax calls one of the devices; empty if the table of chips has no name.
      device_memory_bytes: what the compiler lets one device use, or all it has where that is not
        known.
      num_hosts: of all granules together; each is one jax process.
      topology: for compile-only clients: `v5e:4x4`; empty for GPUs, and for TPUs that cannot be
        compiled for.
      chip_config: for compile-only clients: `megacore` where two cores are one device.
      host: for compile-only clients: chips of one host along each of three dimensions; empty for
        GPUs.
      gpu: name of the target configuration in `data/gpus/`; empty for TPUs, and for GPUs that
        cannot be compiled for.
      joined_hosts: how many share one domain of NVLink; 1 where each is a domain by itself.
      is_memory_stated: the user's own file says how much memory programs can have.
    """

    selector: str
    fabric: Fabric
    device_kind: str
    device_memory_bytes: int
    num_hosts: int
    topology: str = ""
    chip_config: str = ""
    host: tuple[int, ...] = ()
    gpu: str = ""
    joined_hosts: int = 1
    is_memory_stated: bool = False

    @property
    def platform(self) -> str:
        return self.fabric.chip.platform

    @property
    def num_devices(self) -> int:
        return self.fabric.num_devices
