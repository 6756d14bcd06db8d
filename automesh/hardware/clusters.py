"""Clusters that the user describes, as targets; `clusters_file` reads them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from automesh.errors import UsageError
from automesh.hardware.absent import Absent
from automesh.hardware.chips import Chip
from automesh.hardware.fabric.fabric import torus_of
from automesh.hardware.gpu_configurations import configuration_of
from automesh.hardware.machines import Machine, check_filled, cluster_of
from automesh.hardware.slices import Dims, Generation

_PART = re.compile(r"(?P<name>.+)-(?P<count>[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of GPUs that a switch joins.

    Attributes:
      machine: one node.
    """

    machine: Machine
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Slices of TPUs that are linked in a torus.

    Attributes:
      generation: the generation as which the compiler knows the chips; None if it does not know
        them.
      torus, wraps, host: see `Absent`.
    """

    generation: Generation | None
    torus: Dims
    wraps: tuple[bool, ...]
    host: Dims
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserCluster:
    """One cluster that the user describes.

    Attributes:
      name: of the target, and of its rules.
      chip: its slug names the chip on record as which programs are compiled; empty if it is like
        none.
      memory_bytes: memory of one device that programs can have.
      is_memory_stated: the file states `memory_bytes`; otherwise it is that of the chip on record.
      source: where its figures come from, in the user's words.
      figures: a hash of all that the file says about it.
    """

    name: str
    chip: Chip
    parts: Nodes | Slices
    memory_bytes: int
    source: str
    figures: str
    is_memory_stated: bool = False

    def devices(self, text: str) -> Absent | None:
        """Returns the devices that a target name means; None if it does not name this cluster.

        Raises:
          UsageError: more than there are, or nodes that are not filled.
        """
        part = _PART.fullmatch(text)
        if text != self.name and (part is None or part["name"] != self.name):
            return None
        most, what = self._largest_number()
        count = most if text == self.name or part is None else int(part["count"])
        if not 1 <= count <= most:
            raise UsageError(
                f"target `{text}` asks for {count} {what} of `{self.name}`, which has {most}",
                hint=f"use `{self.name}` for all of them",
            )
        if isinstance(self.parts, Slices):
            return self._slices(self.parts, count, text)
        return self._nodes(self.parts.machine, count, text)

    def _largest_number(self) -> tuple[int, str]:
        """Returns the largest number that may follow the name, and what it counts."""
        if isinstance(self.parts, Slices):
            return self.parts.count, "slices"
        return self.parts.count * self.parts.machine.devices, "devices"

    def _nodes(self, machine: Machine, count: int, text: str) -> Absent:
        check_filled(machine, count, text)
        return cluster_of(
            machine,
            self.chip,
            count,
            selector=text,
            gpu=configuration_of(self.chip),
            memory_bytes=self.memory_bytes,
        )

    def _slices(self, parts: Slices, count: int, text: str) -> Absent:
        known = parts.generation
        return Absent(
            selector=text,
            fabric=torus_of(self.chip, parts.torus, wraps=parts.wraps, granules=count),
            device_kind=next(iter(self.chip.device_kinds), ""),
            device_memory_bytes=self.memory_bytes,
            is_memory_stated=self.is_memory_stated,
            num_hosts=count * math.prod(parts.torus) // math.prod(parts.host),
            topology=known.topology(parts.torus) if known else "",
            chip_config=known.chip_config if known else "",
            host=parts.host,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """The clusters of one file."""

    path: Path
    all: tuple[UserCluster, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(cluster.name for cluster in self.all)

    def find(self, text: str) -> tuple[Absent, UserCluster] | None:
        """Returns the devices that a target name means, and their cluster.

        Raises:
          UsageError: more than the cluster has, or nodes that are not filled.
        """
        # The whole name first: `lab-2` may be the name of a cluster, although `lab` is one, too.
        for cluster in sorted(self.all, key=lambda one: one.name != text):
            if absent := cluster.devices(text):
                return absent, cluster
        return None
