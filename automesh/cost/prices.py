"""What a batch of plans costs: seconds by cause, a bracket, a bound and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.cost.unique_rows import Codes
from automesh.hardware.fabric.fabric import Floats
from automesh.outcomes import Estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The causes of the plans of one set of active axes.

    Attributes:
      active: axes larger than 1.
      plans: [plans] their rows in the batch, ascending.
      causes: names of the rows of `cause_s`.
      cause_s: [causes, plans]; they sum to the central estimate.
      uncounted: what has no price, in words.
      own: True if the terms were made for one mesh alone.
    """

    active: tuple[str, ...]
    plans: Codes
    causes: tuple[str, ...]
    cause_s: Floats
    uncounted: tuple[str, ...]
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a batch of plans costs; every array is [plans].

    Attributes:
      needs_own: True where the terms do not hold: the mesh needs a propagation of its own. All
        seconds are NaN there, and counts 0.
      step_s: central estimate.
      lower_s, upper_s: what must take that long at the assumed speeds when everything that may
        overlap does, and what it takes if nothing overlaps.
      bound_s: no step can be faster; see `automesh.cost.bound`.
      memory_bytes: peak on one device.
      collectives: executed per step.
      blocks: causes, by set of active axes.
      block, column: where in `blocks` a plan's causes are.
    """

    needs_own: NDArray[np.bool_]
    step_s: Floats
    lower_s: Floats
    upper_s: Floats
    bound_s: Floats
    memory_bytes: NDArray[np.int64]
    collectives: Floats
    blocks: tuple[Block, ...]
    block: NDArray[np.int32]
    column: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.step_s)

    def estimated(self, row: int) -> Estimated:
        """The estimate of one plan.

        Raises:
          ValueError: the plan needs a propagation of its own.
        """
        if self.needs_own[row]:
            raise ValueError(f"no terms hold for plan {row}: it needs a propagation of its own")
        block, column = self.blocks[self.block[row]], self.column[row]
        seconds = [
            (cause, float(spent))
            for cause, spent in zip(block.causes, block.cause_s[:, column], strict=True)
            if spent > 0.0
        ]
        return Estimated(
            step_s=float(self.step_s[row]),
            bracket_s=(float(self.lower_s[row]), float(self.upper_s[row])),
            bound_s=float(self.bound_s[row]),
            memory_bytes=int(self.memory_bytes[row]),
            causes=tuple(sorted(seconds, key=lambda cause: (-cause[1], cause[0]))),
            uncounted=block.uncounted,
            own_propagation=block.own,
        )

    def cause_s(self, cause: str) -> Floats:
        """Seconds of one cause: [plans], 0 where a plan has none of it."""
        seconds = np.where(self.needs_own, np.nan, 0.0)
        for block in self.blocks:
            if cause in block.causes:
                seconds[block.plans] = block.cause_s[block.causes.index(cause)]
        return seconds
