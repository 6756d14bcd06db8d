"""Finals on simulated machines: what is exported, how often wrongly, and what intervals hold.

A baseline and two challengers are run in fresh processes, eight visits each, by the package's own
logic: until it has decided, or for 40 processes. The reference is the textbook's: twenty processes
for everybody, then one paired t of the best challenger against the baseline at 2.5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from automesh.mesh.axes import MeshAxis, Plan
from automesh.tuner.measure.final import Final, FinalRules
from automesh.tuner.measure.statistics import Floats
from benchmarks.race_errors.noise import noise

VISITS = 8
MOST = 40
FIXED = 20
LUCK = 0.02  # standard deviation of what a whole process does to one plan, in every kind of noise
PLANS = tuple(Plan(axes=(MeshAxis(name="dp", ici=size),)) for size in (1, 2, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one final ended.

    Attributes:
      adopted: which challenger replaced the baseline; 0 if none did.
      processes: that were run.
      covered: whether the interval of each challenger's ratio holds the truth.
      settled: whether nothing was left to decide.
    """

    adopted: int
    processes: int
    covered: tuple[bool, ...]
    settled: bool


def processes_of(kind: str, rng: np.random.Generator, size: float) -> Floats:
    """Logarithms of what each process adds to each plan, shape (plans, processes)."""
    visits = noise(kind, rng, len(PLANS), VISITS * MOST, size)
    means = visits.reshape(len(PLANS), MOST, VISITS).mean(axis=2)
    return means + LUCK * rng.standard_normal(means.shape)


def sequential(logs: Floats, true: Floats) -> Ending:
    """The final of the package.

    Args:
      logs: shape (plans, processes), the truth included.
      true: of each plan, a logarithm.
    """
    baseline, *challengers = PLANS
    final = Final(rules=FinalRules(), baseline=(baseline,), incumbent=(), rows=[], failed=set())
    settled = False
    for number in range(MOST):
        entrants = final.entrants(challengers)
        settled = not entrants
        if settled:
            break
        final.rows.append(
            {plan: math.exp(float(logs[PLANS.index(plan), number])) for plan in entrants}
        )
    covered: list[bool] = []
    for place, plan in enumerate(challengers, 1):
        low, high = final.compare(plan, baseline).interval
        covered.append(low <= math.exp(float(true[place] - true[0])) <= high)
    (exported,) = final.exported()
    return Ending(
        adopted=PLANS.index(exported),
        processes=len(final.rows),
        covered=tuple(covered),
        settled=settled or not final.entrants(challengers),
    )


def fixed_sample(logs: Floats, true: Floats) -> Ending:
    """Twenty processes, then a paired t for each challenger, Bonferroni over both."""
    gaps = logs[1:, :FIXED] - logs[0, :FIXED]
    level = 0.025 / len(gaps)
    faster = [
        place
        for place, gap in enumerate(gaps, 1)
        if stats.ttest_1samp(gap, 0.0, alternative="less").pvalue <= level
    ]
    best = min(faster, key=lambda place: float(gaps[place - 1].mean()), default=0)
    spans = [stats.ttest_1samp(gap, 0.0).confidence_interval(0.95) for gap in gaps]
    covered = tuple(
        bool(span.low <= true[place] - true[0] <= span.high) for place, span in enumerate(spans, 1)
    )
    return Ending(adopted=best, processes=FIXED, covered=covered, settled=True)


METHODS: dict[str, Callable[[Floats, Floats], Ending]] = {
    "final": sequential,
    "fixed": fixed_sample,
}


def figures(
    method: Callable[[Floats, Floats], Ending],
    kind: str,
    *,
    finals: int,
    size: float,
    faster: float,
    seed: int,
) -> dict[str, float]:
    """Shares over many finals in which one challenger is faster than the baseline, or none.

    Args:
      faster: how much faster the first challenger is than the other two, 0.1 for 10 %.

    Returns:
      adopted: share of finals in which that challenger was exported; with `faster` of 0, in which
        any was, which is wrong. wrong: those in which the other one was. covered: of intervals.
        settled: share that were decided. processes: on average.
    """
    rng = np.random.default_rng(seed)
    true = np.array([0.0, -math.log1p(faster), 0.0])
    ended = [method(true[:, None] + processes_of(kind, rng, size), true) for _ in range(finals)]
    right = [one.adopted == 1 if faster else one.adopted > 0 for one in ended]
    return {
        "adopted": round(float(np.mean(right)), 4),
        "wrong": round(float(np.mean([one.adopted == 2 for one in ended])), 4),
        "covered": round(float(np.mean([held for one in ended for held in one.covered])), 4),
        "settled": round(float(np.mean([one.settled for one in ended])), 4),
        "processes": round(float(np.mean([one.processes for one in ended])), 1),
    }
