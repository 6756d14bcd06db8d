"""Fresh processes: in each of them baseline, exported plan and challengers are timed side by
side."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from automesh.mesh.axes import Plan
from automesh.outcomes import Failure
from automesh.report.progress import Progress
from automesh.tuner.measure.final import FEWEST, LOOKS, Final
from automesh.tuner.measure.schedule import Calibration, Course, Subject, VisitPool, VisitRules
from automesh.tuner.measure.statistics import median_interval

MOST_PASSES = 8
FEWEST_PASSES = 2
PROCESS_START_S = 3.0  # assumed before a process takes its first job; the rest is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The time of a step from fresh processes.

    Attributes:
      rounds_s: one value per process, seconds per step.
      step_s: their median.
      interval_s: its 95 % interval, over processes.
    """

    plan: Plan
    rounds_s: tuple[float, ...]
    step_s: float
    interval_s: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRun:
    """The result of one fresh process.

    Attributes:
      seconds: seconds per step of every plan that ran in all completed passes.
      failures: the failures of plans that failed in it.
      is_whole: False if the time ran out before one pass was complete: then `seconds` is empty.
      took_s: seconds from its start to its last visit.
    """

    seconds: tuple[tuple[Plan, float], ...]
    failures: tuple[tuple[Plan, Failure], ...]
    is_whole: bool
    took_s: float


def run_process(
    pool: VisitPool,
    subject: Subject,
    entrants: Sequence[Calibration],
    *,
    rules: VisitRules,
    number: int,
    passes: int,
    deadline_s: float,
    clock: Callable[[], float],
) -> ProcessRun:
    """Visits the entrants in turns (A B C C B A ...) in a process of their own.

    The best of many is partly best by chance, and each process has random effects of its own
    (addresses, threads), so figures of the race are not used here. A slow drift affects all plans
    alike, because each has early and late turns.

    Args:
      number: the number of the process; it determines which plan begins.
      passes: the most passes over the entrants; see `passes_of`.
      deadline_s: when to stop, on `clock`.
      clock: monotonic seconds.
    """
    course = Course(pool=pool, subject=subject, rules=rules, clock=clock, deadline_s=deadline_s)
    # A fresh process makes the state of a plan anew, which no visit of the race did.
    course.visit_s.update(
        {entrant.plan: entrant.visit_s + entrant.first.setup_s for entrant in entrants}
    )
    course.start_s = start_s_of(entrants)
    order = list(entrants)
    random.Random(f"final {number}").shuffle(order)
    passes = passes_of(entrants, passes)
    logs: dict[Plan, list[float]] = {one.plan: [] for one in order}
    failures: dict[Plan, Failure] = {}
    begun_s = clock()
    pool.recycle()
    is_over = False
    for visits in _visits(order, passes, is_together=subject.fits([one.plan for one in order])):
        chosen = [one for one in visits if one.plan not in failures]
        values_s = {} if is_over else course.round_of(chosen)
        is_over = is_over or len(values_s) < len(chosen)
        for plan, value_s in values_s.items():
            if isinstance(value_s, Failure):
                failures[plan] = value_s
            else:
                logs[plan].append(math.log(value_s))
    left = {plan: found for plan, found in logs.items() if plan not in failures}
    # In an interrupted pass the plans would have been timed at different times.
    whole = min(map(len, left.values()), default=0)
    return ProcessRun(
        seconds=tuple(
            (plan, math.exp(sum(found[:whole]) / whole)) for plan, found in left.items() if whole
        ),
        failures=tuple(failures.items()),
        is_whole=bool(whole) or not left,
        took_s=clock() - begun_s,
    )


def passes_of(entrants: Sequence[Calibration], most: int = MOST_PASSES) -> int:
    """Returns the passes over the entrants in a process: as much timed work as its start takes;
    fewer if making the states takes longer than that work.

    The number is even, so that no plan has more early turns than others. It is one if even two
    passes would take three times as long as the start.

    Args:
      most: the most passes for which there is time.
    """
    pass_s = sum(max(entrant.visit_s, entrant.state_s) for entrant in entrants)
    start_s = start_s_of(entrants) + sum(entrant.first.setup_s for entrant in entrants)
    passes = 2 * max(1, round(start_s / max(2 * pass_s, 1e-9)))
    return 1 if 2 * pass_s > 3 * start_s else min(most, passes)


def start_s_of(entrants: Sequence[Calibration]) -> float:
    """Returns the seconds that a process needs before it makes the state of its first plan."""
    return PROCESS_START_S + max((entrant.first.start_s for entrant in entrants), default=0.0)


def process_s_of(entrants: Sequence[Calibration], most: int = MOST_PASSES) -> float:
    """Returns the expected seconds of one process, from its start to its last visit.

    Args:
      most: the most passes for which there is time.
    """
    passes = passes_of(entrants, most)
    return start_s_of(entrants) + sum(
        entrant.first.setup_s - entrant.state_s + passes * entrant.whole_s for entrant in entrants
    )


def _visits(
    order: Sequence[Calibration], passes: int, *, is_together: bool
) -> list[Sequence[Calibration]]:
    """Returns which plans are visited at once, in the order of the visits."""
    every = turns(order, passes)
    size = len(order) if is_together else 1
    return [every[first : first + size] for first in range(0, len(every), size)]


def turns(order: Sequence[Calibration], passes: int) -> list[Calibration]:
    """Returns the plans in the order of their visits, one pass after the other: forwards,
    backwards, backwards, forwards."""
    backwards = list(reversed(order))
    return [
        one for number in range(passes) for one in (backwards if number % 4 in (1, 2) else order)
    ]


def run_side_by_side(
    *,
    final: Callable[[], Final],
    contenders: Callable[[Final], Sequence[Plan]],
    run_row: Callable[[Final, Sequence[Plan]], bool],
    most: int = LOOKS[-1],
) -> Literal["decided", "enough", "no time"]:
    """Times the best and the baseline side by side, row by row, until their order is decided.

    Args:
      final: all rows so far.
      contenders: plans that may be the fastest and are in no row yet, the likeliest first.
      run_row: times the entrants side by side, in a fresh worker or by runs of a command, and
        stores it; False if there is no time for that.
      most: the most rows in which all entrants run; then it ends with `enough`.
    """
    while True:
        rows = final()
        entrants = rows.entrants(contenders(rows))
        if not entrants:
            return "decided"
        if rows.count(*entrants) >= most:
            return "enough"
        if not run_row(rows, entrants):
            return "no time"


def show_rows(progress: Progress, count: int, note: str) -> None:
    """Shows the number of rows of the exported plan, and after how many the next look is due."""
    total = next((look for look in LOOKS if look > count), LOOKS[-1])
    progress.phase("confirm", total=total, done=count, note=note)


def figures_of(final: Final) -> dict[Plan, Figure]:
    """Returns the figure of each plan that ran in at least three processes."""
    plans = dict.fromkeys(plan for row in final.rows for plan in row)
    found: dict[Plan, Figure] = {}
    for plan in plans:
        rounds_s = final.values_of(plan)
        if len(rounds_s) >= FEWEST and plan not in final.failed:
            found[plan] = Figure(
                plan=plan,
                rounds_s=rounds_s,
                step_s=float(np.median(rounds_s)),
                interval_s=median_interval(rounds_s),
            )
    return found
