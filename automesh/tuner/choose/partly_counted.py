"""Plans whose time is known in part only, while that of others is known as a whole (pure).

A loop whose length the data decide is counted once, a kernel that states no cost by its operands: a
plan with more of these than others would win by what was not counted. It is ranked behind them,
shown with a mark, and what an estimate says of it is not believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Outcome, open_ended

_Outcome = TypeVar("_Outcome", bound=Outcome)


def uncounted_of(outcome: Outcome | None) -> tuple[str, ...]:
    """What has no price in an estimate or in a compiled program, in words."""
    match outcome:
        case Estimated(uncounted=uncounted):
            return uncounted
        case Compiled(counts=counts, replay=replay):
            return (*counts.uncounted, *(replay.uncounted if replay else ()))
        case _:
            return ()


def partly_counted(outcomes: Mapping[Plan, Outcome]) -> frozenset[Plan]:
    """Plans with work of unknown length that others of the same kind of outcome do not have.

    What all of them have, a kernel that every plan calls, says nothing about their order.
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
    """The outcomes without those of partly counted plans."""
    apart = partly_counted(outcomes)
    return {plan: outcome for plan, outcome in outcomes.items() if plan not in apart}
