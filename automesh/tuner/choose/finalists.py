"""Chooses plans for compiles and races from the state of a search (pure functions)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from automesh.mesh.axes import Plan
from automesh.outcomes import Measured
from automesh.tuner.choose.beliefs import RefinedTimes
from automesh.tuner.choose.certificate import MAY_WIN
from automesh.tuner.choose.ranking import promising
from automesh.tuner.choose.sampler import LIMIT, propose
from automesh.tuner.choose.state import SearchState

COMPILES_PER_FINALIST = 3  # some fail, some are duplicates, some need more memory than estimated


def to_compile(state: SearchState, *, wanted: int) -> tuple[Plan, ...]:
    """Returns the plans to compile before the first race: the best, the baseline, all without an
    estimate.

    If these are too many, a sampler chooses among them.

    Args:
      wanted: number of plans with an estimate, counting those that are already compiled.
    """
    excluded = state.excluded()
    view = state.view()
    ordered = state.order([plan for plan in state.plans if plan not in excluded], view)
    blind = [plan for plan in ordered if plan not in state.estimates]
    if len(blind) > LIMIT:
        blind = [
            *(plan for plan in blind if plan in state.programs or plan in state.first),
            *_proposed(state, blind, view, wanted, excluded=set(state.programs)),
        ]
    best = [plan for plan in ordered if plan in state.estimates and plan not in state.first]
    taken = {*state.first, *best[:wanted], *blind}
    return tuple(plan for plan in ordered if plan in taken)


def _proposed(
    state: SearchState,
    plans: Sequence[Plan],
    view: RefinedTimes,
    number: int,
    *,
    excluded: Collection[Plan],
) -> tuple[Plan, ...]:
    known = {plan: view.step_s(plan) for plan in view.rows}
    known |= {plan: one.step_s for plan, one in state.results.items() if isinstance(one, Measured)}
    among = set(plans)
    others = {plan for plan in state.plans if plan not in among}
    return propose(state.plans, known, number=number, excluded={*others, *excluded})


def finalists(state: SearchState) -> tuple[Plan, ...]:
    """Returns the plans of the first race: the baseline, the promised plan, and the best compiled
    ones."""
    step_s = state.view().step_s
    return promising(state.programs, first=state.first, limit=state.top, seconds=step_s)


def challengers(state: SearchState) -> tuple[Plan, ...]:
    """Returns the plans that may still win and are worth another race, the likeliest first.

    While the model cannot estimate its own error, these are all plans that it can predict.
    """
    view = state.view()
    if view.refinement is None:
        return ()
    knows_little = view.refinement.loo_error is None
    chances = state.chances(state.best_s())
    likely = [chance.plan for chance in chances if knows_little or chance.chance >= MAY_WIN]
    blind = [plan for plan in state.left() if plan not in view.rows]
    if len(blind) <= LIMIT:
        return tuple(likely)
    # Half of the places are for plans that the model cannot predict.
    half = state.top // 2 or 1
    proposed = _proposed(state, blind, view, half, excluded=set(state.programs))
    return (*likely[: state.top - half], *proposed, *likely[state.top - half :])


def raceable(state: SearchState, plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Returns the plans whose compiled program was not measured; one plan for each program."""
    left = set(state.left())
    known = {
        plan: state.programs[plan] for plan in plans if plan in left and plan in state.programs
    }
    return promising(known, first=(), limit=len(known))
