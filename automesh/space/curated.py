"""The compiler options that come with automesh for `--xla curated`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from automesh.mesh.axes import Scalar
from automesh.mesh.strict_files import read_table
from automesh.space.space import Knob

CURATED = "curated"
_TABLE = Path(__file__).parent / "data" / "curated_options.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class CuratedOption:
    """One row of `data/curated_options.toml`.

    Attributes:
      values: the compiler's own choice first.
      reason: what it changes, and when that is faster.
      generations: slugs of its chips; empty for all of the platform.
      slices: True if it only matters between slices.
    """

    platform: str
    name: str
    values: list[Scalar]
    reason: str
    source: str
    generations: list[str] = field(default_factory=list[str])
    slices: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _CuratedTable:
    option: list[CuratedOption]


@cache
def curated_options() -> tuple[CuratedOption, ...]:
    """Returns all options on record."""
    return tuple(read_table(_TABLE, _CuratedTable).option)


def curated_for(platform: str, chip: str, num_granules: int) -> tuple[Knob, ...]:
    """Selects the options that are worth trying on some devices.

    Args:
      platform: cpu, gpu or tpu.
      chip: its slug; empty if not known.
      num_granules: slices or hosts.
    """
    return tuple(
        Knob(name=option.name, values=tuple(option.values))
        for option in curated_options()
        if option.platform == platform
        and (not option.generations or chip in option.generations)
        and (not option.slices or num_granules > 1)
    )
