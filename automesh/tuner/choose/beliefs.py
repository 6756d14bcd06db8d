"""What is believed of every plan: its estimate, corrected by what was measured (pure functions)."""

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
class View:
    """The refined times of plans that have an estimate or were compiled.

    Attributes:
      rows: place of each such plan in `refinement`.
      refinement: None if there is no such plan.
    """

    rows: Mapping[Plan, int]
    refinement: Refinement | None

    def step_s(self, plan: Plan) -> float:
        """Seconds of a step; infinite for a plan of which nothing is known."""
        row = self.rows.get(plan)
        if row is None or self.refinement is None:
            return math.inf
        return float(self.refinement.step_s[row])


def view_of(
    plans: Sequence[Plan],
    estimates: Mapping[Plan, Estimated],
    programs: Mapping[Plan, Outcome],
    results: Mapping[Plan, Outcome],
    chip: Chip | None = None,
) -> View:
    """Fits the residual model to what was measured, or replayed where nothing can be measured.

    A plan without an estimate is predicted from its compiled program, if it has one that is counted
    as far as those of the others.

    Args:
      chip: that programs are predicted for; None: plans without an estimate are left out.
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
        return View(rows={}, refinement=None)
    among = {plan: one for plan, one in wholly_counted(results).items() if plan in rows}
    times = {rows[plan]: seconds for plan, seconds in known_s(among).items()}
    return View(rows=rows, refinement=refine(subjects, times))


def known_s(results: Mapping[Plan, Outcome]) -> dict[Plan, float]:
    """Measured seconds, or replayed ones; a replayed program of several plans counts once."""
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
    view: View,
    estimates: Mapping[Plan, Estimated],
    compiled: Mapping[Plan, Outcome],
    *,
    usual: Plan,
    first: Sequence[Plan],
    device_memory_bytes: int,
) -> tuple[Plan, ...]:
    """An order to compile in: `first`, the estimated ones, the others, those that hardly fit.

    Args:
      compiled: what is known so far.
      usual: a plan with the default knobs and compiler options.
      device_memory_bytes: 0 where nobody says.
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
