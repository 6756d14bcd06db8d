"""How far a search is, as data: its phases, how long they will take, and the words for that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from automesh.report.words import clean
from automesh.units import format_wait

Clock = Callable[[], float]
_RECENT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How far one phase is.

    Attributes:
      first_done: `done` when this run took it up.
      started_s: clock time of the first report.
      reported_s: clock time of the last one.
      durations_s: of the trials that finished in this run, the last 20.
    """

    name: str
    total: int
    done: int
    note: str
    lanes: int
    first_done: int
    started_s: float
    reported_s: float
    durations_s: tuple[float, ...] = ()

    @property
    def is_finished(self) -> bool:
        """True if nothing is left to do."""
        return self.done >= self.total

    def left_s(self, now_s: float) -> float | None:
        """Seconds until the phase ends: 0 if it is late, None if nothing is known or left."""
        left = self.total - self.done
        if self.durations_s:
            expected = remaining_s(self.durations_s, left, lanes=self.lanes)
        elif self.done > self.first_done:
            expected = (self.reported_s - self.started_s) / (self.done - self.first_done) * left
        else:
            return None
        return max(expected - (now_s - self.reported_s), 0.0) if left > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """All that a display shows; replaced as a whole, so no drawing thread sees half a change.

    Attributes:
      now: what the search is at, or found last.
      doing: what its workers do at this moment.
    """

    started_s: float
    phases: tuple[Phase, ...] = ()
    now: str = ""
    doing: str = ""
    best: str = ""


def remaining_s(durations_s: Sequence[float], left: int, *, lanes: int) -> float:
    """Seconds until `left` trials are done, by the median: one slow compile must not spoil it.

    >>> remaining_s([2.0, 2.0, 60.0], left=5, lanes=2)
    6.0
    """
    rounds = math.ceil(max(left, 0) / max(lanes, 1))
    return rounds * statistics.median(durations_s)


def with_phase(
    state: State,
    name: str,
    *,
    total: int,
    done: int,
    note: str,
    took_s: float,
    lanes: int,
    now_s: float,
) -> State:
    """The state after a report on a phase."""
    known = next((phase for phase in state.phases if phase.name == name), None)
    if known is None:
        known = Phase(
            name=name,
            total=total,
            done=done,
            note="",
            lanes=lanes,
            first_done=done,
            started_s=now_s,
            reported_s=now_s,
        )
        state = replace(state, phases=(*state.phases, known))
    recent = (*known.durations_s, took_s) if took_s > 0 else known.durations_s
    changed = replace(
        known,
        total=total,
        done=done,
        note=clean(note),
        lanes=lanes,
        reported_s=now_s,
        durations_s=recent[-_RECENT:],
    )
    phases = tuple(changed if phase.name == name else phase for phase in state.phases)
    return replace(state, phases=phases)


def left_text(phase: Phase, now_s: float) -> str:
    """`about 2 min left`; empty if nothing is known or left."""
    left = phase.left_s(now_s)
    if left is None:
        return ""
    return f"about {format_wait(left)} left" if left > 0 else "taking longer than expected"


def phase_text(phase: Phase, state: State, now_s: float) -> str:
    """One line on one phase: `compile 31/120, 2 failed, about 2 min left, best dp:8 12.3 ms`."""
    parts = [f"{phase.name} {phase.done}/{phase.total}", phase.note, left_text(phase, now_s)]
    if state.best:
        parts.append(f"best {state.best}")
    return ", ".join(part for part in parts if part)
