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

from automesh.cost.pricing import Least
from automesh.cost.terms import Terms
from automesh.mesh.axes import PIPELINE, Call, Plan, format_setting
from automesh.outcomes import Estimated, open_ended
from automesh.program.nouns import Propagation
from automesh.report.progress import Progress
from automesh.report.result import Candidate
from automesh.report.so_far import SETTLED_ROWS, Parts, SoFar, what_is_missing
from automesh.report.words import count
from automesh.tuner.choose.ranking import estimated_candidates, hardly_fits
from automesh.tuner.estimate.prices import Prices
from automesh.tuner.estimate.propagations import Active, Group, Need, is_of

ROWS = SETTLED_ROWS  # of the table on the display
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
      least: gives what no estimate of a propagated step is below, on any mesh; None: not known.
      settled_at: how many plans had an estimate when the first ten were settled; 0: they are not.
    """

    progress: Progress
    baseline: tuple[Plan, ...] = ()
    device_memory_bytes: int = 0
    keep: Callable[[SoFar], object] = lambda _: None
    least: Callable[[Terms], Least | None] = lambda _: None
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
    _least: dict[Call, Least | None] = field(init=False, default_factory=dict[Call, "Least | None"])
    _shown_s: float = field(init=False, default=-math.inf)
    _is_shown: bool = field(init=False, default=False)
    _is_doubtful: bool = field(init=False, default=False)
    settled_at: int = field(init=False, default=0)

    def begin(self, groups: Sequence[Group], example: Callable[[Group, Need], str]) -> None:
        """Starts anew with the plans that will be estimated.

        Args:
          example: gives a plan of a need, as text.
        """
        self._best, self._parts, self._least = {}, set(), {}
        self._is_doubtful, self.settled_at = False, 0
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

    def learn(self, need: Need, made: Propagation) -> None:
        """Lowers what no estimate with a call is below, by one more propagation with this call.

        A propagation for a single mesh says nothing about others. A program that differs from mesh
        to mesh may do less on another one: then nothing is certain before the end.
        """
        self._is_doubtful |= bool(made.failed_probes or (made.terms.fixed and need.probes))
        found = None if made.pipeline else self.least(made.terms)
        before = self._least.get(need.call)
        if found is not None and before is not None:
            found = Least(
                step_s=min(found.step_s, before.step_s),
                memory_bytes=min(found.memory_bytes, before.memory_bytes),
            )
        self._least[need.call] = found or before

    def has_least(self, call: Call) -> bool:
        """Whether something is known that no estimate with a call is below."""
        return self._least.get(call) is not None

    def is_behind(self, call: Call) -> bool:
        """Whether no mesh with a call that has no estimate yet can come among the first ten."""
        return self._is_behind([call])

    @property
    def is_settled(self) -> bool:
        """Whether the first ten plans are those of the complete ranking, in the same order.

        Each plan without an estimate comes behind them: it takes longer at least, or surely needs
        more memory than a device has. Stays true; before, it is computed again at each call.
        """
        if not self.settled_at and self._finds_settled():
            self.settled_at = self._count(_KNOWN)
        return self.settled_at > 0

    def _finds_settled(self) -> bool:
        calls = [call for call, states in self._states.items() if (states == _OPEN).any()]
        return bool(calls) and self._is_behind(calls)

    def _is_behind(self, calls: Sequence[Call]) -> bool:
        bounds = [self._least.get(call) for call in calls]
        if None in bounds or self._is_doubtful or len(self._best) < ROWS:
            return False
        if any(open_ended(one.uncounted) for one in self._best.values()):
            return False  # Which plans leave out more than all others is known at the end only.
        last = self._best[self._ranked()[ROWS - 1].plan]
        is_large = hardly_fits(last, self.device_memory_bytes)
        return all(
            (is_large, last.step_s) < (self._is_too_large(one), one.step_s)
            for one in bounds
            if one is not None
        )

    def _is_too_large(self, least: Least) -> bool:
        return 0 < self.device_memory_bytes < least.memory_bytes

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
        ranked = self._ranked()
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
            is_settled=self.is_settled,
        )

    def _ranked(self) -> tuple[Candidate, ...]:
        return estimated_candidates(
            self._best, baseline=self.baseline, device_memory_bytes=self.device_memory_bytes
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
