"""What chips achieve of their data sheets; figures with their sources in `data/achieved.json`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from automesh.hardware.chips import Chip
from automesh.mesh.strict_files import check_tree, parse_tree, read_text
from automesh.package import PACKAGE

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
    protocols: tuple[tuple[float, float, float, float], ...]
    between: float
    between_decay: float
    between_start_s: float
    overlaps: int
    sources: dict[str, str]


def achieved_by(chip: Chip) -> Achieved:
    """The row of the chip; what it leaves out is that of its platform."""
    return _read(chip.platform, "" if chip.rough else chip.slug)


@cache
def _read(platform: str, slug: str) -> Achieved:
    table = parse_tree(read_text(_TABLE), source=_TABLE)
    usual: dict[str, Any] = table["platforms"][platform]
    own: dict[str, Any] = table["chips"].get(slug, {})
    return check_tree({**usual, **own}, Achieved, source=_TABLE)
