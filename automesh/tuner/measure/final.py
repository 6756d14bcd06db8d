"""The final as pure logic: who is measured in fresh processes, how they compare, what is exported.

A row is one fresh process, in which every entrant was timed in turns: baseline, exported plan and
one or two challengers. What two plans differ by is the mean of the logarithms of their ratios, row
by row, with Student's t: whatever a whole process is slower by is in both and falls out.

The data are looked at after 5, 7, 10, 14, 20, 28 and 40 rows. Each look may err with half of the
chance that the one before it had, so that all of them together err in 5 % of searches, however
long they go on (the union bound); the interval that is shown is the one that decides. Equality is
tested by two one-sided tests at 5 % (Schuirmann, J. Pharmacokin. Biopharm. 15, 1987). How often all
this is wrong, by simulation: `python -m benchmarks.race_errors`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from automesh.mesh.axes import Plan
from automesh.outcomes import processes_disagree
from automesh.report.comparison import Comparison, Verdict
from automesh.tuner.measure.statistics import Floats, median_interval, trimmed_mean

FEWEST = 3  # below this many processes nothing is exported
LOOKS = (5, 7, 10, 14, 20, 28, 40)
_HALF = 0.5
_EQUAL_ERROR = 0.05

Row = Mapping[Plan, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRules:
    """When two plans are told apart.

    Attributes:
      error: chance, over all looks, that the interval of a pair misses the truth.
      margin: plans that differ by less than this share are equally fast.
      entrants: plans in a process, the baseline and the exported one among them.
    """

    error: float = 0.05
    margin: float = 0.02
    entrants: int = 3

    def level(self, count: int) -> float:
        """Chance of an error that is spent by the look at so many rows."""
        passed = sum(look <= count for look in LOOKS)
        return self.error * _HALF ** max(passed, 1)


def comparison_of(logs: Floats, rules: FinalRules) -> Comparison:
    """Compares by the logarithms of ratios, one per process, in order of time.

    The verdict is one of `COMPARED`: `no faster` if it is not faster by more than the margin, and
    may be slower; `undecided` if more processes are needed to say.
    """
    count = len(logs)
    if count < FEWEST:
        return Comparison(
            verdict="undecided",
            ratio=float(np.exp(np.mean(logs))) if count else 1.0,
            interval=(0.0, math.inf),
            basis="fresh processes",
            processes=count,
            more_processes=LOOKS[0] - count,
        )
    mean = trimmed_mean(logs)
    low, high = mean.interval(1 - rules.level(count))
    verdict = verdict_of((low, high), mean.interval(1 - 2 * _EQUAL_ERROR), rules.margin)
    needed = count
    if verdict == "undecided":
        spread = mean.error * math.sqrt(count)
        needed = _needed(mean.mean, spread, count, rules)
    return Comparison(
        verdict=verdict,
        ratio=math.exp(mean.mean),
        interval=(math.exp(low), math.exp(high)),
        basis="fresh processes",
        processes=count,
        more_processes=needed - count,
    )


def verdict_of(
    interval: tuple[float, float], narrow: tuple[float, float], margin: float
) -> Verdict:
    """Returns the verdict that two intervals of the logarithm of a ratio allow.

    Args:
      interval: two-sided, at the level at which a difference is shown.
      narrow: that of two one-sided tests, at which equality is.
    """
    reach = math.log1p(margin)
    if interval[1] < 0.0:
        return "faster"
    if interval[0] > 0.0:
        return "slower"
    if -reach <= narrow[0] and narrow[1] <= reach:
        return "equal"
    return "no faster" if narrow[0] >= -reach else "undecided"


def _needed(mean: float, spread: float, count: int, rules: FinalRules) -> int:
    """Processes that should decide, if mean and spread stay what they are.

    Args:
      spread: standard deviation of one process's logarithm.
    """
    # Student's t at the levels of the looks is near 3.6, at that of equality near 1.8.
    apart = (3.6 * spread / max(abs(mean), 1e-9)) ** 2
    room = math.log1p(rules.margin) + mean
    near = (1.8 * spread / room) ** 2 if room > 0 else math.inf
    least = max(min(apart, near), count + 1)
    return next((look for look in LOOKS if look >= least), math.ceil(min(least, 1e6)))


@dataclass(slots=True, kw_only=True)
class Final:
    """All rows so far.

    Attributes:
      baseline: the script's own plan, or nothing.
      incumbent: what was exported before, or nothing: it is replaced only by what is faster.
      rows: seconds per step by plan, one row per process.
      failed: plans that may not be exported any more.
    """

    rules: FinalRules
    baseline: tuple[Plan, ...]
    incumbent: tuple[Plan, ...]
    rows: list[Row]
    failed: set[Plan]

    def count(self, *plans: Plan) -> int:
        """Processes in which all of them ran."""
        return sum(all(plan in row for plan in plans) for row in self.rows)

    def values_of(self, plan: Plan) -> tuple[float, ...]:
        """Seconds per step of a plan, one per process that it ran in."""
        return tuple(row[plan] for row in self.rows if plan in row)

    def compare(self, plan: Plan, other: Plan, *, at_look: bool = False) -> Comparison:
        """Returns a plan against another one, over the processes in which both ran.

        Args:
          at_look: by the rows of the last look alone: what is decided between two looks would not
            be paid for.
        """
        rows = [row for row in self.rows if plan in row and other in row]
        if at_look:
            rows = rows[: max((look for look in LOOKS if look <= len(rows)), default=0)]
        logs = np.log(np.asarray([row[plan] / row[other] for row in rows], dtype=np.float64))
        return comparison_of(logs, self.rules)

    def exported(self, *, at_look: bool = False) -> tuple[Plan, ...]:
        """Returns the plan that the rows are for, or nothing where no plan ran in three processes.

        The baseline stays unless another plan is shown to be faster; of several such plans the one
        that was exported before, unless another is shown to be faster than it.
        """
        known = [plan for plan in self._plans() if plan not in self.failed]
        known = [plan for plan in known if self.count(plan) >= FEWEST]
        own = [plan for plan in self.baseline if plan in known]
        others = [plan for plan in known if plan not in own]
        if own:
            found = {other: self.compare(other, own[0], at_look=at_look) for other in others}
            others = [plan for plan, one in found.items() if one.verdict == "faster"]
            if not others:
                return (own[0],)
        if not others:
            return ()
        yardstick = own[0] if own else max(others, key=self.count)
        best = min(others, key=lambda other: self.compare(other, yardstick).ratio)
        kept = [plan for plan in self.incumbent if plan in others]
        if kept and self.compare(best, kept[0], at_look=at_look).verdict != "faster":
            return (kept[0],)
        return (best,)

    def entrants(self, contenders: Collection[Plan]) -> tuple[Plan, ...]:
        """Who runs in the next process; nobody if nothing is left to decide.

        Args:
          contenders: plans that did not run in any process yet and may be faster than what is
            exported, the likeliest first; of those that did, the rows tell.
        """
        exported = self.exported(at_look=True)
        named = dict.fromkeys([*contenders, *self._plans()])
        alive = [plan for plan in named if plan not in self.failed]
        own = [plan for plan in self.baseline if plan not in self.failed]
        always = list(dict.fromkeys([*own, *exported])) or alive[:1]
        reference = exported or tuple(always[:1])
        challengers = [
            plan
            for plan in alive
            if plan not in always
            and self.compare(plan, reference[0], at_look=True).verdict == "undecided"
        ]
        challengers.sort(key=lambda plan: -self.count(plan))
        room = max(self.rules.entrants - len(always), 1)
        if challengers:
            return (*always, *challengers[:room])
        is_known = bool(always) and self.count(*always) >= LOOKS[0]
        if is_known and any(map(self._is_unsteady, exported)) and self.count(*always) < LOOKS[-1]:
            return tuple(always)  # The machine was busy: its time is still to be found out.
        return () if is_known else tuple(always)

    def _is_unsteady(self, plan: Plan) -> bool:
        """Whether processes disagree so much about a plan's time that it may not become a rule."""
        values = self.values_of(plan)
        if len(values) < FEWEST:
            return False
        return processes_disagree(values, median_interval(values))

    def _plans(self) -> tuple[Plan, ...]:
        return tuple(dict.fromkeys(plan for row in self.rows for plan in row))
