"""The final as pure logic: which plans are measured in fresh processes, how they compare, and which
is exported.

A row is one fresh process, in which all entrants were timed in turns: baseline, exported plan and
one or two challengers. The difference of two plans is the mean over the rows of the logarithms of
their ratios, with Student's t: a delay of a whole process affects both plans and cancels out.

The data are looked at after 5, 7, 10, 14, 20, 28 and 40 rows. Each look has half the chance of an
error that the look before it had, so that all looks together err in 5 % of searches, however long
they go on (the union bound); the interval that is shown is the one that decides. Equality is tested
by two one-sided tests at 5 % (Schuirmann, J. Pharmacokin. Biopharm. 15, 1987). How often all this
is wrong, by simulation: `python -m benchmarks.race_errors`.
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

FEWEST = 3  # with fewer processes nothing is exported
LOOKS = (5, 7, 10, 14, 20, 28, 40)
_HALF = 0.5
_EQUAL_ERROR = 0.05

Row = Mapping[Plan, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRules:
    """The conditions under which two plans count as different.

    Attributes:
      error: chance, over all looks, that the interval of a pair misses the truth.
      margin: plans that differ by less than this share are equally fast.
      entrants: plans in a process, including the baseline and the exported plan.
    """

    error: float = 0.05
    margin: float = 0.02
    entrants: int = 3

    def level(self, count: int) -> float:
        """Returns the chance of an error that the look at so many rows may spend."""
        passed = sum(look <= count for look in LOOKS)
        return self.error * _HALF ** max(passed, 1)


def comparison_of(logs: Floats, rules: FinalRules) -> Comparison:
    """Compares by the logarithms of ratios, one per process, in order of time.

    The verdict is one of `COMPARED`: `no faster` if it is not faster by more than the margin, and
    may be slower; `undecided` if more processes are needed to decide.
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
      narrow: the interval of two one-sided tests, at the level at which equality is shown.
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
    """Returns the number of processes that should decide, if mean and spread stay the same.

    Args:
      spread: standard deviation of one process's logarithm.
    """
    # Student's t is near 3.6 at the levels of the looks, and near 1.8 at the level of equality.
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
      incumbent: the plan that was exported before, or nothing; only a faster plan replaces it.
      rows: seconds per step by plan, one row per process.
      failed: plans that may not be exported any more.
    """

    rules: FinalRules
    baseline: tuple[Plan, ...]
    incumbent: tuple[Plan, ...]
    rows: list[Row]
    failed: set[Plan]

    def count(self, *plans: Plan) -> int:
        """Returns the number of processes in which all of `plans` ran."""
        return sum(all(plan in row for plan in plans) for row in self.rows)

    def values_of(self, plan: Plan) -> tuple[float, ...]:
        """Returns the seconds per step of a plan, one value per process that it ran in."""
        return tuple(row[plan] for row in self.rows if plan in row)

    def compare(self, plan: Plan, other: Plan, *, at_look: bool = False) -> Comparison:
        """Compares a plan with another one, over the processes in which both ran.

        Args:
          at_look: whether to use only the rows of the last look: the error bound does not allow for
            decisions between two looks.
        """
        rows = [row for row in self.rows if plan in row and other in row]
        if at_look:
            rows = rows[: max((look for look in LOOKS if look <= len(rows)), default=0)]
        logs = np.log(np.asarray([row[plan] / row[other] for row in rows], dtype=np.float64))
        return comparison_of(logs, self.rules)

    def exported(self, *, at_look: bool = False) -> tuple[Plan, ...]:
        """Returns the plan to export, or nothing if no plan ran in three processes.

        The baseline stays unless another plan is shown to be faster; among several faster plans,
        the one that was exported before stays, unless another is shown to be faster than it.
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
        """Returns the plans of the next process; none if nothing is left to decide.

        Args:
          contenders: plans that did not run in any process yet and may be faster than the exported
            plan, the likeliest first. Other plans are judged by their rows.
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
            # The machine was busy, so the time of this plan is not known well yet.
            return tuple(always)
        return () if is_known else tuple(always)

    def _is_unsteady(self, plan: Plan) -> bool:
        """Whether processes disagree so much about a plan's time that it must not become a rule."""
        values = self.values_of(plan)
        if len(values) < FEWEST:
            return False
        return processes_disagree(values, median_interval(values))

    def _plans(self) -> tuple[Plan, ...]:
        return tuple(dict.fromkeys(plan for row in self.rows for plan in row))
