"""The last word: winner and baseline measured again in fresh processes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from automesh.ladder.statistics import Ratio, median_interval, paired_ratio
from automesh.ladder.visits import Calibration, Course, Subject, VisitPool, VisitRules
from automesh.mesh.axes import Plan
from automesh.outcomes import Failure

FEWEST = 3  # below this many processes a median with an interval is no evidence
MOST_PASSES = 4  # A B B A B A A B: neither has the earlier places, nor the later ones
PROCESS_START_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Time of a step from fresh processes.

    Attributes:
      rounds_s: one value per process, seconds per step.
      step_s: their median.
      interval_s: its 95 % interval, over processes.
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
    so the race's figure of the winner is biased: it is not used here. In a process both are visited
    in turns, for about as long as it takes to start one and to set both up.

    Args:
      processes: fresh processes.
      seed: of the order.
      deadline_s: when to stop, on `clock`; the first three processes are granted in any case.
      clock: monotonic seconds.
      on_round: called with plan, process number and seconds per step after each process.
    """
    pair = {one.plan: one for one in (winner, baseline) if one is not None}
    values: dict[Plan, list[float]] = {plan: [] for plan in pair}
    failures: dict[Plan, Failure] = {}
    ended: Ended = "all processes"
    course = Course(pool=pool, subject=subject, rules=rules, clock=clock, deadline_s=deadline_s)
    # A fresh process sets a plan up anew, which no visit of the race did.
    first_s = {plan: one.visit_s + one.first.setup_s for plan, one in pair.items()}
    passes = passes_of(tuple(pair.values()))
    process_s = process_s_of(tuple(pair.values()))
    for process in range(processes):
        order = [plan for plan in pair if plan not in failures]
        # The least evidence is granted past any deadline: a winner that is not confirmed is lost.
        is_due = process < FEWEST
        course.deadline_s = max(deadline_s, clock() + rules.timeout_s) if is_due else deadline_s
        if not is_due and clock() + process_s > deadline_s:
            ended = "deadline"
            break
        begun_s = clock()
        course.visit_s.update(first_s)
        random.Random(f"{seed} {process}").shuffle(order)
        pool.recycle()
        logs: dict[Plan, list[float]] = {plan: [] for plan in order}
        for plan in _turns(order, passes):
            if plan in failures:
                continue
            value_s = course.value_of(pair[plan])
            if value_s is None:
                ended = "deadline"
                break
            if isinstance(value_s, Failure):
                failures[plan] = value_s
            else:
                logs[plan].append(math.log(value_s))
        process_s = clock() - begun_s
        # A pass that was cut short would compare other times of the one than of the other.
        whole = min((len(logs[plan]) for plan in order if plan not in failures), default=0)
        for plan in order:
            if plan not in failures and whole:
                value_s = math.exp(sum(logs[plan][:whole]) / whole)
                values[plan].append(value_s)
                on_round(plan, process, value_s)
        if winner.plan in failures:
            ended = "failed"
        if ended != "all processes":
            break
    rival = None if baseline is None else baseline.plan
    return confirmation_of(winner.plan, rival, values, failures, ended)


def passes_of(pair: Sequence[Calibration]) -> int:
    """Passes over winner and baseline in a process: as long as it takes to start, 4 at most."""
    pass_s = sum(one.visit_s for one in pair)
    start_s = PROCESS_START_S + sum(one.first.setup_s for one in pair)
    return max(1, min(MOST_PASSES, int(start_s / max(pass_s, 1e-9))))


def process_s_of(pair: Sequence[Calibration]) -> float:
    """What one process should take, from its start to its last visit."""
    visits_s = sum(one.first.setup_s + passes_of(pair) * one.visit_s for one in pair)
    return PROCESS_START_S + visits_s


def _turns(order: Sequence[Plan], passes: int) -> list[Plan]:
    """Whom to visit, one pass after the other: forwards, backwards, backwards, forwards."""
    backwards = list(reversed(order))
    return [plan for number in range(passes) for plan in (backwards if number in (1, 2) else order)]


def confirmation_of(
    winner: Plan,
    baseline: Plan | None,
    values: Mapping[Plan, Sequence[float]],
    failures: Mapping[Plan, Failure],
    ended: Ended,
) -> Confirmation:
    """What fresh processes say of winner and baseline.

    Args:
      values: seconds per step, one per process; those at the same place are from the same time.
      failures: of a plan that failed on the way.
    """
    first = _figure(winner, values, failures)
    second = None if baseline is None else _figure(baseline, values, failures)
    ratio = None
    if isinstance(first, Figure) and isinstance(second, Figure) and first.plan != second.plan:
        ratio = paired_ratio(second.rounds_s, first.rounds_s)
    return Confirmation(winner=first, baseline=second, to_winner=ratio, ended=ended)


def _figure(
    plan: Plan, values: Mapping[Plan, Sequence[float]], failures: Mapping[Plan, Failure]
) -> Figure | Failure | None:
    if plan in failures:
        return failures[plan]
    rounds_s = tuple(values[plan])
    if len(rounds_s) < FEWEST:
        return None
    return Figure(
        plan=plan,
        rounds_s=rounds_s,
        step_s=float(np.median(rounds_s)),
        interval_s=median_interval(rounds_s),
    )
