"""Outcomes of plans that were visited once, and have neither a race nor a fresh process yet."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from automesh.mesh.axes import Plan
from automesh.outcomes import Measured, Numerics, Outcome
from automesh.report.comparison import Comparison
from automesh.tuner.choose.ranking import may_be_exported
from automesh.tuner.measure.decision import Compared, measured_outcome
from automesh.tuner.measure.final import LOOKS
from automesh.tuner.measure.fresh_processes import process_s_of
from automesh.tuner.measure.numerics import Reference, check
from automesh.tuner.measure.schedule import Calibration

_NO_REFERENCE = "there was no time to run what it is compared with"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVisits:
    """The first visits of one machine, which a resumed search need not repeat."""

    machine: str
    calibrations: tuple[Calibration, ...]
    references: tuple[Reference, ...]


def seen_once(
    visits: StoredVisits,
    compiled: Mapping[Plan, Outcome],
    measured: Mapping[Plan, Outcome],
    *,
    winner: Sequence[Plan] = (),
) -> tuple[dict[Plan, Outcome], Compared]:
    """Turns first visits into outcomes: they are the best evidence that exists for their plans.

    Args:
      compiled: the compile outcomes of the plans that are searched.
      measured: plans with better evidence.
      winner: the exported plan, or nothing. Its processes ran at another time, so others are
        compared with its first visit; if it has none, they are left out.

    Returns:
      The outcomes, and how the others compare with the fastest, which is undecided.
    """
    seen = {one.plan: one for one in visits.calibrations}
    if not all(plan in seen for plan in winner):
        return {}, ()
    once = {
        one.plan: one
        for one in visits.calibrations
        if one.plan in compiled and one.plan not in measured
    }
    found: dict[Plan, Outcome] = {
        plan: _outcome(one, compiled[plan], _numerics(visits, one)) for plan, one in once.items()
    }
    others = found if winner else {**measured, **found}
    times = {
        plan: one.step_s
        for plan, one in others.items()
        if isinstance(one, Measured) and may_be_exported(one)
    }
    times |= {plan: statistics.median(seen[plan].first.samples_s) for plan in winner}
    if not times:
        return found, ()
    best = (*winner, min(times, key=lambda plan: (times[plan], str(plan))))[0]
    return found, tuple(
        (
            plan,
            Comparison(
                verdict="undecided",
                ratio=times[plan] / times[best],
                interval=(0.0, times[plan] / times[best]),
                basis="first visits",
                more_processes=LOOKS[0],
                more_s=LOOKS[0] * process_s_of([seen[one] for one in (best, plan) if one in seen]),
            ),
        )
        for plan in times
        if plan != best and plan in once
    )


def _outcome(one: Calibration, compiled: Outcome, numerics: tuple[Numerics, str]) -> Measured:
    samples_s = one.first.samples_s
    return measured_outcome(
        one,
        compiled,
        numerics,
        samples_s,
        step_s=statistics.median(samples_s),
        interval_s=(min(samples_s), max(samples_s)),
    )


def _numerics(visits: StoredVisits, one: Calibration) -> tuple[Numerics, str]:
    for reference in visits.references:
        return check(reference, one.plan, one.first)
    return "not_compared", _NO_REFERENCE
