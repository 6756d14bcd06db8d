"""Figures of a chip that only a replay needs; their sources are in `data/engines.json`."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.hardware.chips import Chip, row_of
from automesh.package import PACKAGE

_TABLE = PACKAGE / "hardware" / "data" / "engines.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The figures of one jax device; the table's `meta` explains the fields.

    Attributes:
      flops_per_cycle: 0 where no compiler states cycles.
    """

    flops_per_cycle: int
    host_bytes_per_s: float
    onchip: float
    onchip_bytes: int
    epilogue_bytes: float
    window_flops_per_byte: float
    sources: dict[str, str]

    def clock_hz(self, chip: Chip) -> float:
        """Returns cycles per second: peak FLOP/s divided by the FLOPs of a cycle; 0 if unknown."""
        return chip.flops_per_s / self.flops_per_cycle if self.flops_per_cycle else 0.0


def engines_of(chip: Chip) -> Engines:
    """Returns the row of the chip, completed with the figures of its platform."""
    return row_of(_TABLE, chip, Engines)
