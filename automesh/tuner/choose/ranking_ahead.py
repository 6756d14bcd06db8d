"""From compiles for absent devices to ranked candidates (pure functions)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Outcome
from automesh.report.result import Candidate, Standing

_Place = tuple[int, float, bool, str]


def rank_ahead(
    *,
    compiled: Mapping[Plan, Outcome],
    screened: Mapping[Plan, Outcome],
    estimates: Mapping[Plan, Estimated],
    baseline: Collection[Plan],
) -> tuple[Candidate, ...]:
    """Orders all that was compiled: by replay, then by estimate, then failures.

    Args:
      compiled: at default effort.
      screened: at low effort; what that says of time counts for nothing, so such a plan stands with
        its estimate, and is left out if it has none.
      estimates: of plans that were compiled.
    """
    found: list[Candidate] = []
    for plan in dict.fromkeys([*compiled, *screened]):
        outcome, estimated = compiled.get(plan, screened.get(plan)), estimates.get(plan)
        is_low = isinstance(outcome, Compiled) and outcome.effort == "low"
        if outcome is None or (is_low and estimated is None):
            continue
        found.append(
            Candidate(
                plan=plan,
                outcome=estimated if is_low and estimated else outcome,
                standing=Standing(verdict="not_measured"),
                bound_by=_bound_by(outcome, estimated),
                peak_bytes=outcome.memory.peak_bytes if isinstance(outcome, Compiled) else 0,
                is_baseline=plan in baseline,
                compiled=outcome if is_low and isinstance(outcome, Compiled) else None,
                estimated=None if is_low else estimated,
            )
        )
    found.sort(key=_place)
    return tuple(_with_standing(one, found[0]) for one in found)


def _place(candidate: Candidate) -> _Place:
    match candidate.outcome:
        case Compiled(step_s=step_s, same_as=same_as):
            return (0, step_s, bool(same_as), str(candidate.plan))
        case Estimated(step_s=step_s):
            return (1, step_s, False, str(candidate.plan))
        case _:
            return (2, 0.0, False, str(candidate.plan))


def _with_standing(candidate: Candidate, best: Candidate) -> Candidate:
    """The candidate with its ratio to the best: replay over replay, estimate over estimate."""
    outcome, first = candidate.outcome, best.outcome
    if not isinstance(outcome, Compiled | Estimated):
        return _standing(candidate, Standing(verdict="failed"))
    if candidate is best and isinstance(outcome, Compiled):
        return _standing(candidate, Standing(verdict="best"))
    if isinstance(outcome, Compiled) and isinstance(first, Compiled):
        ratio = outcome.step_s / first.step_s
    else:
        base = first if isinstance(first, Estimated) else best.estimated
        ratio = outcome.step_s / base.step_s if base is not None else 1.0
    return _standing(
        candidate, Standing(verdict="not_measured", ratio=ratio, interval=(ratio, ratio))
    )


def _standing(candidate: Candidate, standing: Standing) -> Candidate:
    return replace(candidate, standing=standing)


def _bound_by(outcome: Outcome, estimated: Estimated | None) -> str:
    """The largest cause of the predicted time."""
    if not isinstance(outcome, Compiled):
        return ""
    if outcome.replay is not None and outcome.replay.causes:
        return outcome.replay.causes[0][0]
    return estimated.causes[0][0] if estimated and estimated.causes else ""
