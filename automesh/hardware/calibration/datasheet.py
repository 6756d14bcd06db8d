"""Speeds from data sheets and published measurements, for devices that nobody has calibrated."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce

import numpy as np

from automesh.hardware.calibration.engines import engines_of
from automesh.hardware.calibration.speeds import (
    CollectiveSeconds,
    measured_kind,
    passes_of,
    sent_between,
    sent_inside,
)
from automesh.hardware.chips import Chip, row_of
from automesh.hardware.fabric.fabric import Fabric, Floats, Route
from automesh.hardware.processes import usable_cores
from automesh.package import PACKAGE
from automesh.platforms import platform_named

# The share of its data sheet that a chip achieves; figures and sources: `data/achieved.json`.

_TABLE = PACKAGE / "hardware" / "data" / "achieved.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Achieved:
    """Shares of peaks, and waits; the fields are explained in the table's `meta`."""

    matmul: float
    half_size: float
    size_power: float
    tile: tuple[int, int]
    memory: float
    kernel_s: float
    gather: float
    reduce: float
    all_to_all: float
    small_groups: float
    peers: int
    protocols: tuple[tuple[float, float, float, float, float], ...]
    between: float
    tree: float
    between_start_s: float
    overlaps: int
    sources: dict[str, str]


def achieved_by(chip: Chip) -> Achieved:
    """Returns the row of the chip, completed with the figures of its platform."""
    return row_of(_TABLE, chip, Achieved)


# What `half_size` in achieved.json was measured at: one device of TPU 7x.
_CURVE_FLOPS_PER_S = 1153.5e12
# Share of the on-chip memory that one array may take and still stay there between kernels. A round
# figure, chosen on 45 programs of libtpu 0.0.42 for v5e that are not kept here (15 meshes of three
# models): 1/8 and 1/2 order them no worse, and 0 makes small steps wait for memory.
_STAYS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """Speeds of one device from its data sheet; see `Speeds`.

    Attributes:
      share: part of the chip's figures that one device has; not 1 where virtual devices share the
        cores of a host.
    """

    chip: Chip
    achieved: Achieved
    share: float = 1.0

    @property
    def origin(self) -> str:
        """See `Speeds`."""
        if self.chip.rough:
            return f"rough figures for a {self.chip.name}"
        return f"data sheet of {self.chip.name}"

    @property
    def memory_bytes_per_s(self) -> float:
        """See `Speeds`."""
        return self.achieved.memory * self.chip.hbm_bytes_per_s * self.share

    @property
    def kernel_overhead_s(self) -> float:
        """See `Speeds`."""
        return self.achieved.kernel_s / min(self.share, 1.0)

    @property
    def near_bytes(self) -> float:
        """See `Speeds`."""
        return _STAYS * engines_of(self.chip).onchip_bytes

    @property
    def epilogue_bytes_per_s(self) -> float:
        """See `Speeds`."""
        engines = engines_of(self.chip)
        return engines.epilogue_bytes * engines.clock_hz(self.chip)

    @property
    def host_bytes_per_s(self) -> float:
        """See `Speeds`."""
        return engines_of(self.chip).host_bytes_per_s

    @property
    def window_flops_per_byte(self) -> float:
        """See `Speeds`."""
        return engines_of(self.chip).window_flops_per_byte

    @property
    def bound_memory_bytes_per_s(self) -> float:
        """See `Speeds`."""
        return 0.0 if self.chip.rough else self.chip.hbm_bytes_per_s

    def bound_flops_per_s(self, dtype: str) -> float:
        """See `Speeds`."""
        if self.chip.rough:
            return 0.0
        peaks = dict(self.chip.peak_flops_per_s)
        bits = _bits(dtype)
        if bits < 8:
            return 0.0
        # An 8-bit type without a figure runs as fast as the fastest type of the chip, any other as
        # bf16.
        return peaks.get(_listed_type(dtype), max(peaks.values())) if bits == 8 else peaks["bf16"]

    def matmul_s(self, dtype: str, batch: Floats, m: Floats, n: Floats, k: Floats) -> Floats:
        """See `Speeds`.

        The time of the operations on whole tiles, and a part that grows more slowly: small
        multiplications do not fill the units (fitted to the Ironwood curve of `achieved.json`).
        """
        have = self.achieved
        wide, narrow = have.tile
        # The compiler may keep either operand in the unit.
        rows = np.minimum(_up(m, wide) * _up(n, narrow), _up(m, narrow) * _up(n, wide))
        volume = batch * _up(k, wide) * rows
        peak = self._flops_per_s(dtype) * self.share
        half = have.half_size * (peak / _CURVE_FLOPS_PER_S) ** (1 / have.size_power)
        partial = half**have.size_power * volume ** (1 - have.size_power / 3)
        return np.asarray(2 * (volume + partial) / (have.matmul * peak))

    def collective_s(self, kind: str, payload_bytes: Floats, route: Route) -> CollectiveSeconds:
        """See `Speeds`.

        Latency and bandwidth of rings, and over granules the hierarchy reduce-scatter inside,
        all-reduce of each device's part between, all-gather inside (scaling-book, "Sharded
        matrices" and "GPUs"). Where both parts run at once, one ring goes through all devices of
        the group, whose every link is waited for, and an all-reduce may be a tree between granules
        instead, which waits less and is slower (NCCL's src/graph/tuning.cc, as the protocols).
        """
        inside = self._inside_s(kind, payload_bytes, route)
        sent = sent_between(kind, payload_bytes, route)
        shapes = (False, True) if self.achieved.overlaps and kind == "all-reduce" else (False,)
        ways = [
            self._algorithm_s(kind, route, inside, sent, protocol, is_tree=is_tree)
            for protocol in self.achieved.protocols
            for is_tree in shapes
        ]
        return reduce(_faster, ways)

    def _algorithm_s(
        self,
        kind: str,
        route: Route,
        inside: Floats,
        sent: Floats,
        protocol: tuple[float, float, float, float, float],
        *,
        is_tree: bool,
    ) -> CollectiveSeconds:
        """Times one algorithm of a collective.

        Args:
          inside: seconds inside granules at full speed.
          sent: bytes that a device sends to other granules.
        """
        start, hop, share, step, most = protocol
        speed = route.dcn_bytes_per_s * self.achieved.between * share
        if is_tree:
            speed = speed * self.achieved.tree
        if most:
            speed = np.minimum(speed, most / route.ici_size)
        between = np.where(sent > 0, sent / np.where(sent > 0, speed, 1.0), 0.0)
        inside = inside / share
        if self.achieved.overlaps:
            inside = np.maximum(inside - between, 0.0)
        return CollectiveSeconds(
            latency_s=self._waits_s(kind, route, start, hop, step, is_tree=is_tree),
            ici_s=inside,
            dcn_s=between,
        )

    def _inside_s(self, kind: str, payload: Floats, route: Route) -> Floats:
        size = route.ici_size
        speed = route.ici_bytes_per_s * self._link_share(kind, size) * min(self.share, 1.0)
        sent = sent_inside(kind, payload, route)
        return np.where(size > 1, sent / np.where(size > 1, speed, 1.0), 0.0)

    def _waits_s(
        self, kind: str, route: Route, start: float, hop: float, step: float, *, is_tree: bool
    ) -> Floats:
        """Returns the seconds of latency, before and between messages."""
        inside, granules = route.ici_size > 1, route.dcn_size
        steps = granules - 1
        sends = measured_kind(kind).sends
        if sends == "forward" or (
            sends == "exchange" and platform_named(self.chip.platform).sends_at_once
        ):
            hops, steps = np.where(inside, 1.0, 0.0), np.minimum(steps, 1)
        else:
            hops = passes_of(kind) * np.where(inside, route.ici_hops, 0.0)
            if is_tree or (kind == "all-reduce" and not self.achieved.overlaps):
                steps = 2 * np.log2(granules)
            elif self.achieved.overlaps:
                hops, steps = hops * granules, passes_of(kind) * steps
        total = start + hop * hops + step * steps
        total = total + np.where(granules > 1, self.achieved.between_start_s, 0.0)
        return np.where(inside | (granules > 1), total, 0.0)

    def _link_share(self, kind: str, size: Floats) -> Floats:
        have = self.achieved
        row = measured_kind(kind)
        large = have.reduce if row.passes > 1 else have.gather
        large = have.all_to_all if row.sends == "exchange" else large
        # Where small groups are slower, the figures are those of groups of eight.
        few = 1 - have.small_groups / np.maximum(size, 2)
        reached = np.minimum((np.maximum(size, 2) - 1) / have.peers, 1.0) if have.peers else 1.0
        return large * reached * np.minimum(few / (1 - have.small_groups / 8), 1.0)

    def _flops_per_s(self, dtype: str) -> float:
        peaks = dict(self.chip.peak_flops_per_s)
        if (listed := _listed_type(dtype)) in peaks:
            return peaks[listed]
        slower = dict(platform_named(self.chip.platform).slower_bits)
        return peaks["bf16"] / slower.get(_bits(dtype), 1.0)


def datasheet_speeds(chip: Chip, fabric: Fabric, *, cores: int = 0) -> DataSheet:
    """Returns the speeds of one device of a fabric.

    Args:
      cores: of the host, for virtual CPU devices, which share them; 0 for those of this machine.
    """
    share = 1.0
    if fabric.kind == "shared":
        share = (cores or usable_cores()) / fabric.num_devices
    return DataSheet(chip=chip, achieved=achieved_by(chip), share=share)


def _faster(one: CollectiveSeconds, other: CollectiveSeconds) -> CollectiveSeconds:
    first = one.latency_s + one.ici_s + one.dcn_s <= other.latency_s + other.ici_s + other.dcn_s
    return CollectiveSeconds(
        latency_s=np.where(first, one.latency_s, other.latency_s),
        ici_s=np.where(first, one.ici_s, other.ici_s),
        dcn_s=np.where(first, one.dcn_s, other.dcn_s),
    )


def _up(size: Floats, tile: int) -> Floats:
    return np.ceil(size / tile) * tile


def _bits(dtype: str) -> int:
    found = re.search(r"[0-9]+", dtype)
    return int(found[0]) if found else 8


def _listed_type(dtype: str) -> str:
    """Returns the name of a number type in the table of chips."""
    if re.match(r"f8|float8|fp8", dtype):
        return "fp8"
    if re.fullmatch(r"(u|s|ui|si|i|int|uint)8", dtype):
        return "int8"
    return "bf16" if dtype in ("f16", "float16", "bfloat16") else dtype
