"""Says why no other plan need be tried, in two separate sentences (pure functions).

The certificate uses only the sound bound. The model's belief uses estimates and measurements, and
states its own error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from automesh.cost.correction import Refinement
from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated, Measured, Outcome
from automesh.report.words import count
from automesh.tuner.choose.ranking import may_be_exported
from automesh.units import format_percent, format_seconds

MARGIN = 0.02  # a plan that is faster by less than this is a tie
MAY_WIN = 0.05  # a plan with a smaller chance is not worth a race
_LOOSE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Chance:
    """The model's chance that a plan is faster than the best measured one by more than MARGIN."""

    plan: Plan
    chance: float


def best_upper_s(measured: Mapping[Plan, Outcome]) -> float | None:
    """Returns the upper end of the interval of the fastest exportable plan; None if there is none.

    A bound must exceed it to exclude a plan, since a measurement is not exact.
    """
    uppers = [
        outcome.interval_s[1]
        for outcome in measured.values()
        if isinstance(outcome, Measured) and may_be_exported(outcome)
    ]
    return min(uppers, default=None)


def excluded_by_bound(
    estimates: Mapping[Plan, Estimated], measured: Mapping[Plan, Outcome]
) -> frozenset[Plan]:
    """Returns the plans that cannot be the fastest, whatever the compiler does; never a measured
    one."""
    upper_s = best_upper_s(measured)
    if upper_s is None:
        return frozenset()
    return frozenset(
        plan
        for plan, estimated in estimates.items()
        if estimated.bound_s > upper_s and plan not in measured
    )


def certificate(
    left: Iterable[Plan],
    estimates: Mapping[Plan, Estimated],
    best_s: float | None,
    *,
    once: int = 0,
) -> str:
    """Returns the certificate: what is certain about the plans that were not measured.

    Args:
      left: legal plans that were not measured and did not fail.
      best_s: step time of the fastest measured plan that is exportable; None if there is none.
      once: number of plans that ran in their first visits alone.
    """
    plans = list(left)
    if best_s is None:
        return "nothing was measured, so nothing is certain"
    if once:
        ran = f"{count(once, 'plan')} ran only once, which decides nothing"
        not_run = f", and {_are(len(plans))} not measured" if plans else ""
        return f"{ran}{not_run}: no certificate"
    if not plans:
        return "every legal plan was measured or failed: nothing is left that could be faster"
    bounds = [estimates[plan].bound_s for plan in plans if plan in estimates]
    bounds = [bound_s for bound_s in bounds if bound_s > 0]
    unbounded = len(plans) - len(bounds)
    if unbounded:
        whose = "any of them" if unbounded == len(plans) else f"{unbounded} of them"
        return (
            f"{_are(len(plans))} not measured, and nothing sound is known of {whose}: "
            "no certificate"
        )
    gain = max(1.0 - min(bounds) / best_s, 0.0)
    if gain > _LOOSE:
        return (
            "the sound bound is too loose for a certificate: of the plans not measured it allows "
            f"one a step of {format_seconds(min(bounds))}"
        )
    whose = "the plan" if len(plans) == 1 else f"no plan among the {len(plans)}"
    verb = "cannot beat the best" if len(plans) == 1 else "can beat the best"
    by = f" by more than {format_percent(_rounded_up(gain))}" if gain else ""
    return f"{whose} not measured {verb}{by}: sound bound"


def belief(
    left: int,
    refinement: Refinement | None,
    chances: Sequence[Chance],
    *,
    how: Literal["measured", "replayed"] = "measured",
) -> str:
    """Returns the model's belief about the plans that were not measured, with its error.

    Args:
      left: number of plans that were not measured and did not fail.
      refinement: estimates of all plans, corrected by measurements; None without an estimate.
      chances: chances of the plans that were not measured and that the model can predict, best
        first.
      how: how the times that the model learned from were found.
    """
    if how == "measured":
        sample_of, not_so = ("measurement", "measurements"), "not measured"
    else:
        sample_of, not_so = ("replay", "replays"), "not compiled"
    if not left:
        return ""
    if refinement is None or refinement.loo_error is None:
        sample = refinement.sample if refinement else 0
        return (
            f"no view of the {count(left, 'plan', 'plans')} {not_so}: "
            f"{count(sample, *sample_of)} to learn from, which is too few"
        )
    error = (
        f"its leave-one-out error is {format_percent(refinement.loo_error)} "
        f"over {refinement.sample} {how} plans"
    )
    blind = left - len(chances)
    unseen = f", and no view of {blind} without an estimate" if blind else ""
    if not chances:
        return f"no view of the {left} {not_so}, which have no estimate; {error}"
    best = chances[0]
    may = sum(chance.chance >= MAY_WIN for chance in chances)
    ahead = f"more than {format_percent(MARGIN)} faster than the best"
    if may:
        return (
            f"{count(may, 'plan', 'plans')} {not_so} may be {ahead}, most likely {best.plan} "
            f"(chance {format_percent(best.chance)}){unseen}; {error}"
        )
    whose = "the plan" if len(chances) == 1 else f"none of the {len(chances)} plans"
    verb = "is not" if len(chances) == 1 else "is"
    return (
        f"{whose} {not_so} {verb} believed to be {ahead} "
        f"(highest chance {format_percent(best.chance)}: {best.plan}){unseen}; {error}"
    )


def chances_of(
    plans: Sequence[Plan], rows: Mapping[Plan, int], refinement: Refinement, best_s: float
) -> tuple[Chance, ...]:
    """Returns the chance of each plan to be faster than `best_s` by more than MARGIN, highest
    first.

    Args:
      rows: row of each plan in the refinement; plans without one are left out.
    """
    known = [plan for plan in plans if plan in rows]
    if not known:
        return ()
    all_chances = refinement.chance_below((1 - MARGIN) * best_s)
    chances = all_chances[[rows[plan] for plan in known]]
    order = np.argsort(-chances, kind="stable")
    return tuple(Chance(plan=known[i], chance=float(chances[i])) for i in order.tolist())


def _rounded_up(share: float) -> float:
    """Rounds up to the printed digits, so that the certificate promises no more than the bound."""
    step = 0.001 if share < 0.0995 else 0.01
    return math.ceil(share / step - 1e-9) * step


def _are(number: int) -> str:
    return f"{count(number, 'plan is', 'plans are')}"
