"""The chip table: peak speeds of one jax device, each row with its sources in `data/chips.json`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from automesh.errors import UsageError
from automesh.mesh.strict_files import check_tree, parse_tree, read_table
from automesh.reading import read_text

_TABLE = Path(__file__).parent / "data" / "chips.json"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One jax device: half a chip where a chip is two devices (TPU v2, v3, 7x).

    Attributes:
      name: as its maker calls it.
      slug: as target names call it: `v5p`, `v5litepod`, `h100`.
      platform: cpu, gpu or tpu.
      device_kinds: as jax calls one device of it.
      devices_per_chip: 2 where a chip is two jax devices.
      peak_flops_per_s: dense FLOP/s by number type.
      hbm_bytes: memory; 0 if the row does not say.
      link_bytes_per_s: one way over one ICI link, or over all of a GPU's NVLink.
      link_latency_s: of one hop.
      dcn_bytes_per_s: one way, the device's share of its host's network cards.
      counted_per_device: by how much the number in a target name grows per device (v4, v5p: 2, for
        two cores).
      rough: True for a stand-in that is only good for ordering plans.
      source: where the figures come from.
    """

    name: str
    slug: str
    platform: str
    device_kinds: tuple[str, ...]
    devices_per_chip: int
    peak_flops_per_s: tuple[tuple[str, float], ...]
    hbm_bytes: int
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    dcn_bytes_per_s: float
    counted_per_device: int
    rough: bool
    source: str

    @property
    def flops_per_s(self) -> float:
        """Dense bfloat16 FLOP/s, the denominator of MFU."""
        return dict(self.peak_flops_per_s)["bf16"]


def chip_for(device_kind: str, platform: str) -> Chip:
    """Returns the chip that jax calls `device_kind`, or a stand-in (see `Chip.rough`).

    Raises:
      UsageError: a platform other than cpu, gpu and tpu.
    """
    listed = [(row, chip) for row, chip in _table() if chip.platform == platform]
    if not listed:
        raise UsageError(
            f"nothing is known about devices of the platform `{platform}`",
            hint="search on cpu, gpu or tpu devices",
        )
    for kinds, chip in listed:
        if device_kind in kinds:
            return chip
    return next(chip for _, chip in listed if chip.rough)


def chip_called(slug: str) -> Chip:
    """Returns the chip with this slug.

    Raises:
      KeyError: there is none.
    """
    return {chip.slug: chip for _, chip in _table()}[slug]


@cache
def known_chips() -> dict[str, Chip]:
    """Returns the TPUs and GPUs on record by slug, without stand-ins."""
    return {chip.slug: chip for _, chip in _table() if not chip.rough}


def sources_of(slug: str) -> dict[str, str]:
    """Returns, for each figure of a chip on record, the names of its sources."""
    return next(row.sources for row in _file().chips if row.slug == slug)


def chip_sources() -> dict[str, str]:
    """Returns the full text of each source of the table of chips, by its name."""
    return _file().sources


def row_of(table: Path, chip: Chip, kind: type[T]) -> T:
    """Reads the row of a chip in another table than that of the chips.

    Args:
      table: file with a row for each of `platforms`, and for `chips` that differ from it.
      kind: the dataclass of a row.
    """
    return _row_of(table, chip.platform, "" if chip.rough else chip.slug, kind)


@cache
def _row_of(table: Path, platform: str, slug: str, kind: type[T]) -> T:
    tree = parse_tree(read_text(table), source=table)
    usual: dict[str, Any] = tree["platforms"][platform]
    own: dict[str, Any] = tree["chips"].get(slug, {})
    return check_tree({**usual, **own}, kind, source=table)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChipRow:
    name: str
    slug: str
    counted_per_device: int
    platform: str
    device_kinds: list[str]
    devices_per_chip: int
    flops_per_s: dict[str, float]
    hbm_bytes: int
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    dcn_bytes_per_s: float
    rough: bool
    confidence: str
    sources: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChipTable:
    meta: dict[str, str | dict[str, str]]
    sources: dict[str, str]
    chips: list[_ChipRow]


@cache
def _file() -> _ChipTable:
    return read_table(_TABLE, _ChipTable)


@cache
def _table() -> tuple[tuple[tuple[str, ...], Chip], ...]:
    return tuple((tuple(row.device_kinds), _chip(row)) for row in _file().chips)


def _chip(row: _ChipRow) -> Chip:
    share = row.devices_per_chip
    return Chip(
        name=row.name,
        slug=row.slug,
        platform=row.platform,
        device_kinds=tuple(row.device_kinds),
        devices_per_chip=share,
        peak_flops_per_s=tuple((kind, flops / share) for kind, flops in row.flops_per_s.items()),
        hbm_bytes=row.hbm_bytes // share,
        hbm_bytes_per_s=row.hbm_bytes_per_s / share,
        # The two devices of a chip share its links.
        link_bytes_per_s=row.link_bytes_per_s / share,
        link_latency_s=row.link_latency_s,
        dcn_bytes_per_s=row.dcn_bytes_per_s / share,
        counted_per_device=row.counted_per_device,
        rough=row.rough,
        source="; ".join(f"{what}: {source}" for what, source in row.sources.items()),
    )
