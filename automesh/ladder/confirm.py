"""The last word: winner and baseline measured again in fresh processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from automesh.ladder.statistics import Ratio, median_interval, paired_ratio
from automesh.ladder.visits import Calibration, Course, Subject, VisitPool, VisitRules
from automesh.mesh.axes import Plan
from automesh.outcomes import Failure

_FEWEST = 3  # below this many processes a median with an interval is no evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Time of a step from fresh processes.

    Attributes:
      rounds_s: one value per process, seconds per step.
      step_s: their median.
      interval_s: its 95 % interval, from resampling processes.
    """

    plan: Plan
    rounds_s: tuple[float, ...]
    step_s: float
    interval_s: tuple[float, float]


Ended = Literal["all processes", "deadline", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The only figures that are exported.

    Attributes:
      winner: a failure if it failed; None if there was no time for three processes.
      baseline: as `winner`; None also if there is none; the same figure if it is the winner.
      to_winner: time of the baseline over the winner's: 1.3 is "1.3x faster". None if they are the
        same plan, or either has no figure.
      ended: why no more processes were started.
    """

    winner: Figure | Failure | None
    baseline: Figure | Failure | None
    to_winner: Ratio | None
    ended: Ended


def confirm(
    pool: VisitPool,
    subject: Subject,
    winner: Calibration,
    baseline: Calibration | None,
    *,
    rules: VisitRules,
    processes: int,
    seed: int,
    deadline_s: float,
    clock: Callable[[], float],
    on_round: Callable[[Plan, int, float], None],
) -> Confirmation:
    """Measures winner and baseline side by side in several fresh processes, in shuffled order.

    The best of many is best partly by luck, and a process has luck of its own (addresses, threads),
    so the race's figure of the winner is biased: it is not used here.

    Args:
      processes: fresh processes, each of which visits both once.
      seed: of the order.
      deadline_s: when to stop, on `clock`; the first three processes are granted in any case.
      clock: monotonic seconds.
      on_round: called with plan, process number and seconds per step after each visit.
    """
    pair = {one.plan: one for one in (winner, baseline) if one is not None}
    values: dict[Plan, list[float]] = {plan: [] for plan in pair}
    failures: dict[Plan, Failure] = {}
    ended: Ended = "all processes"
    course = Course(pool=pool, subject=subject, rules=rules, clock=clock, deadline_s=deadline_s)
    # A fresh process sets a plan up anew, which no visit of the race did.
    course.visit_s.update({plan: one.visit_s + one.first.setup_s for plan, one in pair.items()})
    for process in range(processes):
        order = [plan for plan in pair if plan not in failures]
        # The least evidence is granted past any deadline: a winner that is not confirmed is lost.
        is_due = process < _FEWEST
        course.deadline_s = max(deadline_s, clock() + rules.timeout_s) if is_due else deadline_s
        if not is_due and not course.has_time_for(order):
            ended = "deadline"
            break
        random.Random(f"{seed} {process}").shuffle(order)
        pool.recycle()
        for plan in order:
            value_s = course.value_of(pair[plan])
            if value_s is None:
                ended = "deadline"
            elif isinstance(value_s, Failure):
                failures[plan] = value_s
            else:
                values[plan].append(value_s)
                on_round(plan, process, value_s)
        if winner.plan in failures:
            ended = "failed"
        if ended != "all processes":
            break
    return _confirmation(winner, baseline, values, failures, ended)


def _confirmation(
    winner: Calibration,
    baseline: Calibration | None,
    values: Mapping[Plan, list[float]],
    failures: Mapping[Plan, Failure],
    ended: Ended,
) -> Confirmation:
    first = _figure(winner.plan, values, failures)
    second = None if baseline is None else _figure(baseline.plan, values, failures)
    ratio = None
    if isinstance(first, Figure) and isinstance(second, Figure) and first.plan != second.plan:
        ratio = paired_ratio(second.rounds_s, first.rounds_s)
    return Confirmation(winner=first, baseline=second, to_winner=ratio, ended=ended)


def _figure(
    plan: Plan, values: Mapping[Plan, list[float]], failures: Mapping[Plan, Failure]
) -> Figure | Failure | None:
    if plan in failures:
        return failures[plan]
    rounds_s = tuple(values[plan])
    if len(rounds_s) < _FEWEST:
        return None
    return Figure(
        plan=plan,
        rounds_s=rounds_s,
        step_s=float(np.median(rounds_s)),
        interval_s=median_interval(rounds_s),
    )
