"""Ranks candidates from trials, by pure functions, so that recorded studies can be replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from automesh.cost.roofline import predict
from automesh.hardware import Chip
from automesh.mesh.axes import Plan
from automesh.outcomes import EXCLUDED, Compiled, Estimated, Measured, Outcome
from automesh.report.comparison import Comparison, Verdict
from automesh.report.result import Candidate
from automesh.tuner.choose.partly_counted import partly_counted

WIDE = 1.5  # estimates of memory are up to 40 % off: only larger ones count
_TIE = 1e-4  # relative: predictions that are closer are the same, but for the order of their sums


def may_be_exported(outcome: Outcome | None) -> bool:
    """Whether a plan was measured and no difference of its results from the reference is known."""
    return isinstance(outcome, Measured) and outcome.numerics not in EXCLUDED


def best_first(
    plans: Sequence[Plan],
    compiled: Mapping[Plan, Outcome],
    *,
    usual: Plan,
    first: Sequence[Plan] = (),
) -> tuple[Plan, ...]:
    """Returns the order in which to compile: `first`, each mesh with usual settings, other settings
    of good meshes.

    Args:
      compiled: compiled outcomes so far.
      usual: a plan with the default knobs and compiler options.
    """
    predicted_s = {
        plan.axes: outcome.step_s
        for plan, outcome in compiled.items()
        if isinstance(outcome, Compiled) and plan.settings == usual.settings
    }

    def promise(plan: Plan) -> float:
        if plan in first:
            return -1.0
        if plan.settings == usual.settings:
            return 0.0
        return predicted_s.get(plan.axes, math.inf)

    return tuple(sorted(plans, key=promise))


def promising(
    compiled: Mapping[Plan, Outcome],
    *,
    first: Sequence[Plan],
    limit: int,
    seconds: Callable[[Plan], float] | None = None,
) -> tuple[Plan, ...]:
    """Returns the plans to measure: `first`, then the `limit` fastest by prediction, one per
    program.

    If there are several places, the last one goes to the fastest plan whose prediction leaves out
    work, since only a race shows its time.

    Args:
      compiled: outcome of the compile rung by plan.
      first: plans that are measured in any case (the baseline), if they compiled.
      seconds: predicted time of a compiled plan; by default that of the compiled program.
    """
    chosen: dict[str, Plan] = {}
    for plan in first:
        outcome = compiled.get(plan)
        if isinstance(outcome, Compiled):
            chosen[outcome.fingerprint] = plan
    places = len(chosen)
    apart = partly_counted(compiled)
    ranked = sorted(
        (
            (
                plan in apart,
                outcome.step_s if seconds is None or plan in apart else seconds(plan),
                bool(outcome.same_as),
                str(plan),
                plan,
                outcome,
            )
            for plan, outcome in compiled.items()
            if isinstance(outcome, Compiled)
        ),
        key=lambda item: item[:4],
    )
    counted = [(plan, outcome) for is_apart, *_, plan, outcome in ranked if not is_apart]
    others = [(plan, outcome) for is_apart, *_, plan, outcome in ranked if is_apart]
    kept = int(bool(others) and limit > 1)
    for group, last in ((counted, places + limit - kept), (others, places + limit)):
        for plan, outcome in group:
            if len(chosen) >= last:
                break
            chosen.setdefault(outcome.fingerprint, plan)
    return tuple(chosen.values())


def rank(
    *,
    compiled: Mapping[Plan, Outcome],
    measured: Mapping[Plan, Outcome],
    comparisons: Sequence[tuple[Plan, Comparison]],
    baseline: Sequence[Plan],
    chip: Chip,
    winner: Sequence[Plan],
    estimates: Mapping[Plan, Estimated] | None = None,
) -> tuple[Candidate, ...]:
    """Orders all tried plans: exportable ones, other measured ones, predicted ones, failures.

    Args:
      comparisons: comparisons of measured plans with the exported one; a plan without one was
        measured at another time, and is compared by its interval only.
      baseline: the script's own plan, or nothing.
      winner: the exported plan, or nothing; it is first.
      estimates: estimates of the tried plans.
    """
    verdicts = dict(comparisons)
    first = _first_measured(measured, winner)
    outcome = measured.get(first) if first is not None else None
    best_s = outcome.step_s if isinstance(outcome, Measured) else 0.0
    mark: Verdict = "best"
    if baseline and winner:
        mark = "kept" if winner[0] in baseline else "new"
    apart = partly_counted(compiled)
    predicted_s = {
        plan: outcome.step_s
        for plan, outcome in compiled.items()
        if isinstance(outcome, Compiled) and plan not in apart
    }
    of_best_s = predicted_s.get(first) if first is not None else None
    base = _Base(
        best_s=best_s,
        predicted_s=of_best_s or min(predicted_s.values(), default=0.0),
        is_of_best=of_best_s is not None,
    )
    rows: list[tuple[tuple[int, float, str], Candidate]] = []
    for plan in dict.fromkeys([*compiled, *measured]):
        outcome = measured.get(plan) or compiled[plan]
        prediction = compiled.get(plan)
        candidate = Candidate(
            plan=plan,
            outcome=outcome,
            standing=_standing(plan, outcome, verdicts, winner, mark, base),
            bound_by=_program_bound_by(prediction, chip),
            peak_bytes=_peak(outcome, prediction),
            compiled=prediction if isinstance(prediction, Compiled) else None,
            is_baseline=plan in baseline,
            estimated=(estimates or {}).get(plan),
            partly_counted=plan in apart and isinstance(outcome, Compiled),
        )
        rows.append((_order(candidate, plan in winner), candidate))
    return tuple(candidate for _, candidate in sorted(rows, key=lambda row: row[0]))


def hardly_fits(estimated: Estimated, device_memory_bytes: int) -> bool:
    """Whether an estimate of memory exceeds the device's by more than its possible error.

    Args:
      device_memory_bytes: 0 where nobody says.
    """
    least, most = estimated.memory_interval or (estimated.memory_bytes / WIDE, 1)
    if not most:  # Unknown memory: only a compile can tell.
        return False
    return 0 < device_memory_bytes < least


def estimated_candidates(
    estimates: Mapping[Plan, Estimated], *, baseline: Sequence[Plan], device_memory_bytes: int
) -> tuple[Candidate, ...]:
    """Returns plans that have only an estimate: the fastest first, those that are too large last.
    The script's own plan comes before others of the same time.

    Plans whose time is only partly known come after all others.
    """
    apart = partly_counted(estimates)
    ranked = sorted(
        estimates.items(),
        key=lambda item: (
            item[0] in apart,
            hardly_fits(item[1], device_memory_bytes),
            item[1].step_s,
            str(item[0]),
        ),
    )
    best = ranked[:1]
    ranked.sort(
        key=lambda item: (
            not (
                item[0] in baseline
                and (item[0] in apart) == (best[0][0] in apart)
                and not hardly_fits(item[1], device_memory_bytes)
                and item[1].step_s <= best[0][1].step_s * (1 + _TIE)
            )
        )
    )
    best_s = ranked[0][1].step_s if ranked else 0.0
    return tuple(
        Candidate(
            plan=plan,
            outcome=estimated,
            standing=Comparison(
                verdict="not_measured" if place else "best",
                ratio=estimated.step_s / best_s,
                interval=(estimated.step_s / best_s, estimated.step_s / best_s),
                basis="estimate",
            ),
            bound_by=estimated.causes[0][0] if estimated.causes else "",
            peak_bytes=estimated.memory_bytes,
            is_baseline=plan in baseline,
            partly_counted=plan in apart,
        )
        for place, (plan, estimated) in enumerate(ranked)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """The times with which those of all plans are compared.

    Attributes:
      best_s: measured time of the exported plan, or of the fastest that may be exported; 0 if
        there is none.
      predicted_s: predicted time of the same plan, or the shortest prediction if it has none; 0 if
        there is none.
      is_of_best: whether it is that of the same plan.
    """

    best_s: float
    predicted_s: float
    is_of_best: bool


def _first_measured(measured: Mapping[Plan, Outcome], winner: Sequence[Plan]) -> Plan | None:
    """Returns the exported plan, or the fastest that may be exported; None if there is none."""
    eligible = winner or [plan for plan, outcome in measured.items() if may_be_exported(outcome)]
    times = [
        (outcome.step_s, str(plan), plan)
        for plan in eligible
        if isinstance(outcome := measured.get(plan), Measured)
    ]
    return min(times, key=lambda one: one[:2])[2] if times else None


def _standing(
    plan: Plan,
    outcome: Outcome,
    verdicts: Mapping[Plan, Comparison],
    winner: Sequence[Plan],
    mark: Verdict,
    base: _Base,
) -> Comparison:
    best_s = base.best_s
    if isinstance(outcome, Compiled):
        ratio = outcome.step_s / base.predicted_s if base.predicted_s else 1.0
        # Its prediction alone does not compare with measured times: predictions may be far off.
        return Comparison(
            verdict="not_measured",
            ratio=ratio,
            interval=(ratio, ratio),
            basis="replay",
            step_s=best_s * ratio if base.is_of_best else 0.0,
        )
    if not isinstance(outcome, Measured):
        return Comparison(verdict="failed")
    ratio = outcome.step_s / best_s if best_s else 1.0
    low, high = (bound / best_s if best_s else 1.0 for bound in outcome.interval_s)
    if not may_be_exported(outcome):
        return Comparison(verdict="excluded", ratio=ratio, interval=(low, high), basis="step times")
    if plan in winner:
        return Comparison(verdict=mark)
    if plan in verdicts and best_s:
        # Seconds of another race do not compare with the exported plan's: the ratio does.
        return replace(verdicts[plan], step_s=best_s * verdicts[plan].ratio)
    if not winner and outcome.step_s == best_s:
        return Comparison(verdict="best")
    verdict = "slower" if low > 1.0 else "undecided"
    return Comparison(verdict=verdict, ratio=ratio, interval=(low, high), basis="step times")


def _peak(outcome: Outcome, prediction: Outcome | None) -> int:
    if isinstance(outcome, Measured) and outcome.peak_bytes:
        return outcome.peak_bytes
    return prediction.memory.peak_bytes if isinstance(prediction, Compiled) else 0


def _order(candidate: Candidate, is_winner: bool) -> tuple[int, float, str]:
    outcome, text = candidate.outcome, str(candidate.plan)
    if is_winner:
        return (0, 0.0, text)
    if isinstance(outcome, Measured):
        return (1 if may_be_exported(outcome) else 2, candidate.standing.ratio, text)
    if isinstance(outcome, Compiled):
        return (4 if candidate.partly_counted else 3, outcome.step_s, text)
    return (5, 0.0, text)


# Ranks candidates that were compiled for absent devices (pure functions).

_Place = tuple[int, bool, float, bool, str]


def rank_ahead(
    *,
    compiled: Mapping[Plan, Outcome],
    screened: Mapping[Plan, Outcome],
    estimates: Mapping[Plan, Estimated],
    baseline: Collection[Plan],
) -> tuple[Candidate, ...]:
    """Orders all compiled plans: by replay, then by estimate, then failures. The script's own plan
    comes before others of the same time.

    Args:
      compiled: outcomes at default effort.
      screened: outcomes at low effort, whose times do not count: such a plan is ranked by its
        estimate, and left out if it has none.
      estimates: estimates of compiled plans.
    """
    found: list[Candidate] = []
    known, guessed = partly_counted({**screened, **compiled}), partly_counted(estimates)
    for plan in dict.fromkeys([*compiled, *screened]):
        outcome, estimated = compiled.get(plan, screened.get(plan)), estimates.get(plan)
        is_low = isinstance(outcome, Compiled) and outcome.effort == "low"
        if outcome is None or (is_low and estimated is None):
            continue
        found.append(
            Candidate(
                plan=plan,
                outcome=estimated if is_low and estimated else outcome,
                standing=Comparison(verdict="not_measured"),
                bound_by=_bound_by(outcome, estimated),
                peak_bytes=outcome.memory.peak_bytes if isinstance(outcome, Compiled) else 0,
                is_baseline=plan in baseline,
                compiled=outcome if is_low and isinstance(outcome, Compiled) else None,
                estimated=None if is_low else estimated,
                partly_counted=plan in (guessed if is_low else known),
            )
        )
    found.sort(key=_place)
    best = found[:1]
    found.sort(key=lambda one: not (one.is_baseline and _is_tie(one, best[0])))
    return tuple(_with_standing(one, found[0]) for one in found)


def _place(candidate: Candidate) -> _Place:
    match candidate.outcome:
        case Compiled(step_s=step_s, same_as=same_as):
            return (0, candidate.partly_counted, step_s, bool(same_as), str(candidate.plan))
        case Estimated(step_s=step_s):
            return (1, candidate.partly_counted, step_s, False, str(candidate.plan))
        case _:
            return (2, False, 0.0, False, str(candidate.plan))


def _is_tie(candidate: Candidate, best: Candidate) -> bool:
    """Whether the time of a plan is that of the best one, by the same evidence."""
    match candidate.outcome, best.outcome:
        case (Compiled() as here, Compiled() as there) | (
            Estimated() as here,
            Estimated() as there,
        ):
            is_apart = candidate.partly_counted and not best.partly_counted
            return not is_apart and here.step_s <= there.step_s * (1 + _TIE)
        case _:
            return False


def _with_standing(candidate: Candidate, best: Candidate) -> Candidate:
    """Adds a candidate's ratio to the best: replay over replay, or estimate over estimate."""
    outcome, first = candidate.outcome, best.outcome
    if not isinstance(outcome, Compiled | Estimated):
        return replace(candidate, standing=Comparison(verdict="failed"))
    if candidate is best and isinstance(outcome, Compiled):
        return replace(candidate, standing=Comparison(verdict="best"))
    if isinstance(outcome, Compiled) and isinstance(first, Compiled):
        ratio = outcome.step_s / first.step_s
    else:
        base = first if isinstance(first, Estimated) else best.estimated
        ratio = outcome.step_s / base.step_s if base is not None else 1.0
    standing = Comparison(verdict="not_measured", ratio=ratio, interval=(ratio, ratio))
    return replace(candidate, standing=standing)


def _program_bound_by(prediction: Outcome | None, chip: Chip) -> str:
    """Returns the largest cause of a compiled program's time, from its replay if there is one."""
    if not isinstance(prediction, Compiled):
        return ""
    if prediction.replay is not None and prediction.replay.causes:
        return prediction.replay.causes[0][0]
    return predict(prediction.counts, chip).bound_by


def _bound_by(outcome: Outcome, estimated: Estimated | None) -> str:
    """Returns the largest cause of the predicted time."""
    if not isinstance(outcome, Compiled):
        return ""
    if outcome.replay is not None and outcome.replay.causes:
        return outcome.replay.causes[0][0]
    return estimated.causes[0][0] if estimated and estimated.causes else ""
