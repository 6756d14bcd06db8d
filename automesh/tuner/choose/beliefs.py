"""The expected time of every plan: its estimate, corrected by measurements (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from automesh.cost.correction import PredictedPlan, Refinement, refine
from automesh.cost.roofline import predict
from automesh.hardware import Chip
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Measured, Outcome
from automesh.tuner.choose.partly_counted import wholly_counted
from automesh.tuner.choose.ranking import best_first, hardly_fits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RefinedTimes:
    """The refined times of plans that have an estimate or were compiled.

    Attributes:
      rows: row of each such plan in `refinement`.
      refinement: None if there is no such plan.
    """

    rows: Mapping[Plan, int]
    refinement: Refinement | None

    def step_s(self, plan: Plan) -> float:
        """Returns the expected seconds of a step; infinite for a plan without a refined time."""
        row = self.rows.get(plan)
        if row is None or self.refinement is None:
            return math.inf
        return float(self.refinement.step_s[row])


def refined_times(
    plans: Sequence[Plan],
    estimates: Mapping[Plan, Estimated],
    programs: Mapping[Plan, Outcome],
    results: Mapping[Plan, Outcome],
    chip: Chip | None = None,
) -> RefinedTimes:
    """Fits the residual model to measured times, or to replayed ones for absent devices.

    A plan without an estimate is predicted from its compiled program, if its work is counted as
    fully as that of the others.

    Args:
      chip: chip for the predictions; None leaves out plans without an estimate.
    """
    rows: dict[Plan, int] = {}
    subjects: list[PredictedPlan] = []
    whole = wholly_counted(programs)
    for plan in plans:
        subject = _subject(plan, estimates.get(plan), whole.get(plan), chip)
        if subject is not None:
            rows[plan] = len(subjects)
            subjects.append(subject)
    if not subjects:
        return RefinedTimes(rows={}, refinement=None)
    among = {plan: one for plan, one in wholly_counted(results).items() if plan in rows}
    times = {rows[plan]: seconds for plan, seconds in known_s(among).items()}
    return RefinedTimes(rows=rows, refinement=refine(subjects, times))


def known_s(results: Mapping[Plan, Outcome]) -> dict[Plan, float]:
    """Returns the measured or replayed seconds of plans; a replayed program of several plans counts
    once."""
    seen: set[str] = set()
    times: dict[Plan, float] = {}
    for plan, outcome in results.items():
        if isinstance(outcome, Measured):
            times[plan] = outcome.step_s
        elif isinstance(outcome, Compiled) and outcome.fingerprint not in seen:
            seen.add(outcome.fingerprint)
            times[plan] = outcome.step_s
    return times


def _subject(
    plan: Plan, estimated: Estimated | None, compiled: Outcome | None, chip: Chip | None
) -> PredictedPlan | None:
    if estimated is not None:
        return PredictedPlan(
            predicted_s=estimated.step_s, causes=estimated.causes, settings=plan.settings
        )
    if chip is not None and isinstance(compiled, Compiled):
        replay = compiled.replay
        return PredictedPlan(
            predicted_s=compiled.step_s,
            causes=replay.causes if replay else predict(compiled.counts, chip).causes,
            settings=plan.settings,
            evidence="compiled",
        )
    return None


def compile_order(
    plans: Sequence[Plan],
    view: RefinedTimes,
    estimates: Mapping[Plan, Estimated],
    compiled: Mapping[Plan, Outcome],
    *,
    usual: Plan,
    first: Sequence[Plan],
    device_memory_bytes: int,
) -> tuple[Plan, ...]:
    """Returns the order in which to compile: `first`, then plans with an estimate, others, those
    that hardly fit.

    Args:
      compiled: compiled outcomes so far.
      usual: a plan with the default knobs and compiler options.
      device_memory_bytes: memory of one device; 0 if unknown.
    """
    blind = best_first(plans, compiled, usual=usual)
    place = {plan: float(number) for number, plan in enumerate(blind)}

    def key(plan: Plan) -> tuple[int, float]:
        if plan in first:
            return (0, 0.0)
        estimated = estimates.get(plan)
        if estimated is None:
            return (2, place[plan])
        return (3 if hardly_fits(estimated, device_memory_bytes) else 1, view.step_s(plan))

    return tuple(sorted(plans, key=key))
