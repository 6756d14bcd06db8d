"""The events of a replay, in time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

SliceKind = Literal["work", "wait", "transfer", "repeats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of time on one track.

    Attributes:
      kind: `repeats` stands for trips of a loop that are equal to earlier ones and not drawn.
      track: the core or a rank, or a resource.
      cause: as in `outcomes.ReplayOutcome.causes`; empty for a repeat.
      flight: number of the transfer that is on its way or waited for, the same on all its slices;
        -1 if there is none.
      source: `step.py:123`; empty if unknown.
    """

    kind: SliceKind
    track: str
    name: str
    start_s: float
    seconds: float
    cause: str = ""
    flight: int = -1
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timeline of one step.

    Attributes:
      slices: by start; the first trips of every loop, then one slice for all others.
    """

    step_s: float
    slices: tuple[Slice, ...]

    @property
    def tracks(self) -> tuple[str, ...]:
        """Lists the tracks: the core first, or the ranks by number, then the resources by name."""
        names = {slice_.track for slice_ in self.slices}
        return tuple(sorted(names, key=_place))


def _place(track: str) -> tuple[bool, tuple[tuple[str, int], ...]]:
    is_worker = track == "core" or track.startswith("rank ")
    parts = re.findall(r"([^0-9]*)([0-9]*)", track)
    return not is_worker, tuple((words, int(number or -1)) for words, number in parts)
