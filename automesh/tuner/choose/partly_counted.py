"""Finds plans whose time is only partly known, while that of others is fully known (pure).

A loop whose length depends on data is counted once, and a kernel without a stated cost is counted
by its operands. A plan with more of these than others could win only because of uncounted work. So
it is ranked after them and shown with a mark, and its estimate is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Outcome, open_ended

_Outcome = TypeVar("_Outcome", bound=Outcome)


def uncounted_of(outcome: Outcome | None) -> tuple[str, ...]:
    """Returns the work that has no price in an estimate or in a compiled program, in words."""
    match outcome:
        case Estimated(uncounted=uncounted):
            return uncounted
        case Compiled(counts=counts, replay=replay):
            return (*counts.uncounted, *(replay.uncounted if replay else ()))
        case _:
            return ()


def partly_counted(outcomes: Mapping[Plan, Outcome]) -> frozenset[Plan]:
    """Returns the plans with uncounted work that other plans with the same kind of outcome do not
    have.

    Uncounted work of all plans, such as a kernel that every plan calls, does not affect their
    order.
    """
    found: set[Plan] = set()
    for kind in (Estimated, Compiled):
        missing = {
            plan: open_ended(uncounted_of(outcome))
            for plan, outcome in outcomes.items()
            if isinstance(outcome, kind)
        }
        if missing:
            shared = frozenset.intersection(*missing.values())
            found.update(plan for plan, texts in missing.items() if texts - shared)
    return frozenset(found)


def wholly_counted(outcomes: Mapping[Plan, _Outcome]) -> dict[Plan, _Outcome]:
    """Returns the outcomes without those of partly counted plans."""
    apart = partly_counted(outcomes)
    return {plan: outcome for plan, outcome in outcomes.items() if plan not in apart}
