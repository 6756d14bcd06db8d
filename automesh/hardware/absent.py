"""Absent devices: what is known of them without asking jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automesh.hardware.fabric.fabric import Fabric


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentDevices:
    """Absent devices as a compile-only client of jax needs them; sent to workers.

    Attributes:
      device_kind: as jax calls one of the devices.
      num_devices: of all granules together.
      num_hosts: jax processes of all granules together.
      torus: TPU: chips along each dimension of a slice; empty for GPUs.
      wraps: TPU: per dimension, whether its ends are linked; empty for GPUs, and for tori that are
        not wired as Google's, which the compiler does not know.
      devices_per_chip: 2 where a chip is two devices.
      topology: TPU: `v5e:4x4`, empty for TPUs that no compiler knows; GPU: NVLink domains, hosts of
        each and devices of each host: `2x1x8`.
      num_granules: slices, or hosts of GPUs.
      chip_config: TPU: `megacore` where two cores are one device; else empty.
      host: TPU: chips of one host along each of three dimensions; empty for GPUs.
      gpu: name of the target configuration in `data/gpus/`; empty for TPUs, and for GPUs without
        one, for which nothing can be compiled.
      memory_bytes: of one device; stated for GPUs, whose compiler never says that a program does
        not fit, and for attached devices; 0 for other TPUs, whose compiler says so.
      is_attached: this machine has them, but the process that gets this description has not: it
        lowers on virtual devices, which user code sees in place of the real ones.
      says: attributes of attached devices, by name; see `Device.says`.
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
    # Not part of the key of stored programs: nothing is compiled ahead for these.
    is_attached: bool = field(default=False, repr=False)
    says: tuple[tuple[str, int | str], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """Hardware that a target names.

    Attributes:
      selector: name that a rule is written for.
      device_kind: as jax calls one of the devices; empty if the table of chips does not say.
      device_memory_bytes: what the compiler lets one device use; if that is not known, all of its
        memory.
      num_hosts: of all granules together; each is one jax process.
      topology: for compile-only clients: `v5e:4x4`; empty for GPUs, and for TPUs that no compiler
        knows.
      chip_config: for compile-only clients: `megacore` where two cores are one device.
      host: for compile-only clients: chips of one host along each of three dimensions; empty for
        GPUs.
      gpu: name of the target configuration in `data/gpus/`; empty for TPUs, and for GPUs without
        one.
      joined_hosts: hosts that share one NVLink domain; 1 if each is a domain by itself.
      is_memory_stated: the user's own file states how much memory programs can have.
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
