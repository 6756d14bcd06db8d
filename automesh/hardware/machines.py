"""GPU clusters by name: `gpu-h100-64`, `gpu-a3-megagpu-8g-512`, `gpu-p5.48xlarge-256`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from automesh.errors import UsageError, did_you_mean
from automesh.hardware.absent import Absent
from automesh.hardware.chips import Chip, chip_called
from automesh.hardware.fabric.fabric import Fabric
from automesh.hardware.gpu_configurations import configuration_of, usable_bytes_of
from automesh.mesh.strict_files import read_table

_TABLE = Path(__file__).parent / "data" / "machines.json"
_NAME = re.compile(r"(?P<gpu>gpu-)?(?P<machine>.+)-(?P<count>[0-9]+)")
MAX_GPUS = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of GPU machine, as `data/machines.json` has it.

    Attributes:
      name: of the machine, or of the chip for a machine of the usual build.
      chip: slug of the chip.
      devices: GPUs of one machine.
      domain: GPUs that NVLink joins, which may be those of several machines.
      network_bytes_per_s: one way, of all network cards of one machine.
    """

    name: str
    chip: str
    devices: int
    domain: int
    network_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _MachineTable:
    meta: dict[str, dict[str, str]]
    sources: dict[str, str]
    machines: tuple[Machine, ...]


@cache
def _table() -> _MachineTable:
    return read_table(_TABLE, _MachineTable)


def machines() -> dict[str, Machine]:
    """Returns all machines on record, by name."""
    return {machine.name: machine for machine in _table().machines}


def machine_sources() -> dict[str, str]:
    """Returns the full text of each source of the table of machines, by its name."""
    return _table().sources


def read_cluster(text: str) -> Absent | None:
    """Reads the name of a GPU cluster; None if the name does not have that form.

    Args:
      text: in small letters; its last number counts all GPUs.

    Raises:
      UsageError: an unknown machine, or a number of GPUs that leaves a machine partly unused.
    """
    bare = text.removeprefix("gpu-")
    if bare in machines():
        raise UsageError(
            f"target `{text}` does not say how many GPUs",
            hint=f"write for example `gpu-{bare}-{8 * machines()[bare].devices}`",
        )
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    machine = machines().get(match["machine"])
    if machine is None:
        similar = [name for name in machines() if name.startswith(f"{match['machine']}-")]
        if similar or match["gpu"]:
            raise _unknown(text, match["machine"], similar)
        return None
    count = int(match["count"])
    if count > MAX_GPUS:
        raise UsageError(
            f"target `{text}` has {count} GPUs; at most {MAX_GPUS} are possible",
            hint=f"write for example `gpu-{machine.name}-{8 * machine.devices}`",
        )
    check_filled(machine, count, text, prefix="gpu-")
    chip = chip_called(machine.chip)
    return cluster_of(
        machine,
        chip,
        count,
        selector=f"gpu-{machine.name}-{count}",
        gpu=configuration_of(chip),
        memory_bytes=usable_bytes_of(chip),
    )


def check_filled(machine: Machine, count: int, text: str, *, prefix: str = "") -> None:
    """Checks that a number of GPUs is a part of one machine, or fills several.

    Args:
      text: the target's name as written.
      prefix: prefix of the machine's name in targets.

    Raises:
      UsageError: it is neither.
    """
    each = machine.devices
    if 0 < count <= each or (count > each and count % each == 0):
        return
    below = max(count // each * each, 1)
    raise UsageError(
        f"target `{text}` has {count} GPUs; machines of this kind have {each} each, "
        "and several must be filled",
        hint=f"use `{prefix}{machine.name}-{below}` or "
        f"`{prefix}{machine.name}-{max(below // each + 1, 1) * each}`",
    )


def _unknown(text: str, name: str, similar: list[str]) -> UsageError:
    if similar:
        return UsageError(
            f"target `{text}` may mean several machines: {', '.join(similar)}",
            hint=f"write the full name of one of them, as in `{text.replace(name, similar[0])}`",
        )
    return UsageError(
        f"target `{text}` names the GPU machine `{name}`, which is not on record"
        f"{did_you_mean(name, machines())}",
        hint="`automesh targets gpu` lists those that are; or describe yours in a file for "
        "--hardware",
    )


def cluster_of(
    machine: Machine, chip: Chip, count: int, *, selector: str, gpu: str, memory_bytes: int
) -> Absent:
    """Describes the cluster that a number of GPUs makes.

    Args:
      gpu: name of the target configuration; see `Absent`.
      memory_bytes: of one GPU.
    """
    each = min(count, machine.devices)
    return Absent(
        selector=selector,
        fabric=Fabric(
            kind="switch",
            chip=replace(chip, dcn_bytes_per_s=_network_bytes_per_s(machine, chip, count)),
            num_granules=count // each,
            granule_devices=each,
        ),
        device_kind=next(iter(chip.device_kinds), ""),
        device_memory_bytes=memory_bytes,
        num_hosts=count // each,
        gpu=gpu,
        joined_hosts=min(max(machine.domain // each, 1), count // each),
    )


def _network_bytes_per_s(machine: Machine, chip: Chip, count: int) -> float:
    """Returns one GPU's bandwidth between machines: by NVLink, or by network cards."""
    if count <= machine.domain:
        return chip.link_bytes_per_s
    return machine.network_bytes_per_s / machine.devices
