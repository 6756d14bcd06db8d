"""The ranking of the plans that have an estimate, while others still wait for theirs."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from automesh.mesh.axes import PIPELINE, Call, Plan, format_setting
from automesh.outcomes import Estimated
from automesh.report.progress import Progress
from automesh.report.so_far import Parts, SoFar, what_is_missing
from automesh.report.words import count
from automesh.tuner.choose.ranking import estimated_candidates, hardly_fits
from automesh.tuner.estimate.prices import Prices
from automesh.tuner.estimate.propagations import Active, Group, Need, is_of

ROWS = 10  # rows of the table on the display
_MOST_PRICED = 4096  # plans of one propagation that are tried until one fits a device
_EVERY_S = 0.3  # least time between two tables
_OPEN, _KNOWN, _LOST = (
    0,
    1,
    2,
)  # state of a plan: waits, has an estimate, has none


@dataclass(slots=True, kw_only=True)
class Standings:
    """The best plans by the estimates so far.

    The rows are the first ones of the complete ranking of these plans, since each propagation keeps
    as many plans as a table has rows.

    Attributes:
      progress: shows each new table.
      baseline: the script's own plan, or nothing.
      device_memory_bytes: memory of one device; 0 if unknown.
      keep: is called with each new table.
    """

    progress: Progress
    baseline: tuple[Plan, ...] = ()
    device_memory_bytes: int = 0
    keep: Callable[[SoFar], object] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    _best: dict[Plan, Estimated] = field(init=False, default_factory=dict[Plan, Estimated])
    _states: dict[Call, NDArray[np.int8]] = field(
        init=False, default_factory=dict[Call, "NDArray[np.int8]"]
    )
    _waiting: dict[tuple[Call, Active, int], tuple[Group, Need]] = field(
        init=False, default_factory=dict[tuple[Call, Active, int], "tuple[Group, Need]"]
    )
    _parts: set[str] = field(init=False, default_factory=set[str])
    _example: Callable[[Group, Need], str] = field(init=False, default=lambda *_: "")
    _shown_s: float = field(init=False, default=-math.inf)
    _is_shown: bool = field(init=False, default=False)

    def begin(self, groups: Sequence[Group], example: Callable[[Group, Need], str]) -> None:
        """Starts anew with the plans that will be estimated.

        Args:
          example: gives a plan of a need, as text.
        """
        self._best, self._parts = {}, set()
        self._states = {group.call: np.full(len(group.rows), _OPEN, np.int8) for group in groups}
        self._example = example
        self._waiting = {
            _key(need): (group, need)
            for group in groups
            for need in (*group.needs, *group.pipelined)
        }

    def note(self, need: Need, prices: Prices, plan: Callable[[int], Plan]) -> None:
        """Adds the prices of a need's members, and shows the new table.

        Args:
          prices: prices in the order of the need's members.
          plan: gives the plan of a row.
        """
        priced = ~prices.needs_own & (prices.step_s > 0) & np.isfinite(prices.step_s)
        self._states[need.call][np.array(need.members, np.intp)[priced]] = _KNOWN
        if self._waiting.pop(_key(need), None) is not None and priced.any():
            self._parts.update(_parts(need))
        rows = np.flatnonzero(priced)
        rows = rows[np.argsort(prices.step_s[rows], kind="stable")]
        fitting = 0
        for row in map(int, rows[:_MOST_PRICED]):
            estimated = self._best[plan(row)] = prices.estimated(row)
            fitting += not hardly_fits(estimated, self.device_memory_bytes)
            if fitting >= ROWS:
                break
        for mine in self.baseline:
            if is_of(need, mine) and mine not in self._best:
                for row in map(int, np.flatnonzero(priced)):
                    if plan(row) == mine:
                        self._best[mine] = prices.estimated(row)
                        break
        self._is_shown = False
        self.show()

    def note_failure(self, need: Need) -> None:
        """Notes that the members of a need get no estimate."""
        self._waiting.pop(_key(need), None)
        mine = np.array(need.members, np.intp)
        states = self._states[need.call]
        states[mine[states[mine] == _OPEN]] = _LOST
        self._is_shown = False

    def show(self, *, at_once: bool = False) -> None:
        """Shows the table if it has changed, but not too often.

        Args:
          at_once: whether to show it even if another was shown just before.
        """
        now_s = self.clock()
        is_new = bool(self._best) and not self._is_shown
        if not is_new or (now_s - self._shown_s < _EVERY_S and not at_once):
            return
        self._shown_s, self._is_shown = now_s, True
        so_far = self._so_far()
        self.progress.ranking(so_far)
        self.keep(so_far)

    def _so_far(self) -> SoFar:
        ranked = estimated_candidates(
            self._best, baseline=self.baseline, device_memory_bytes=self.device_memory_bytes
        )
        behind = (one for one in ranked[ROWS:] if one.is_baseline)
        waiting, first = Counter[Parts](), dict[Parts, tuple[Group, Need]]()
        for group, need in self._waiting.values():
            waiting[_parts(need)] += len(need.members)
            first.setdefault(_parts(need), (group, need))
        missing = what_is_missing(
            frozenset(self._parts), waiting, lambda parts: self._example(*first[parts])
        )
        if (apart := self._count(_OPEN) - waiting.total()) > 0:
            odd = f"{count(apart, 'plan')} with a program of their own"
            missing = f"{missing}, and {odd}" if missing else odd
        return SoFar(
            rows=(*itertools.islice(ranked, ROWS), *behind),
            estimated=self._count(_KNOWN),
            plans=sum(map(len, self._states.values())),
            missing=missing,
        )

    def _count(self, state: int) -> int:
        return sum(int((states == state).sum()) for states in self._states.values())


def _key(need: Need) -> tuple[Call, Active, int]:
    """Returns the key of a need: its call, active axes and, for pipelines, ranks."""
    return need.call, need.active, dict(need.sizes).get(PIPELINE, 1)


def _parts(need: Need) -> Parts:
    mapping, knobs = need.call
    settings = Plan(axes=(), mapping=mapping, knobs=knobs).settings
    return (*need.active, *(format_setting(*setting) for setting in settings))
