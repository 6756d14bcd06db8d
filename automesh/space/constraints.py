"""Constraints of a search space, applied to the facts of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from automesh.errors import UsageError, did_you_mean
from automesh.mesh.axes import Scalar
from automesh.space.conditions import Rule
from automesh.space.settings import StepFacts
from automesh.space.space import Constraint, Knob, SearchSpace


def rules_of_constraints(
    space: SearchSpace, step: StepFacts, knobs: Sequence[Knob], notices: list[str]
) -> list[Rule]:
    """The constraints as rules; those that do not apply become notices (shipped space) or errors.

    Raises:
      UsageError: a user's own space names a fact or factor that the step lacks; a fact is below 1.
    """
    facts = dict(step.facts)
    values: dict[str, Sequence[Scalar]] = {name: (value,) for name, value in step.knobs}
    values |= {knob.name: knob.values for knob in knobs}
    rules: list[Rule] = []
    for constraint in space.constraints:
        problem = _inapplicable(constraint, facts, space.names, values)
        if problem and not space.shipped:
            raise UsageError(
                f"the constraint `{constraint}` of the search space `{space.name}` {problem}",
                hint="name axes, integer knobs of `build`, and facts of `Workload(facts=...)`",
            )
        if problem:
            notices.append(f"constraint `{constraint}` left out: it {problem}")
            continue
        fact = constraint.bound if isinstance(constraint.bound, str) else ""
        bound = facts[constraint.bound] if isinstance(constraint.bound, str) else constraint.bound
        if bound < 1:
            raise UsageError(
                f"the constraint `{constraint}` needs a positive number, but {fact} is {bound}"
            )
        rules.append(
            Rule(
                name=str(constraint),
                factors=constraint.factors,
                relation=constraint.relation,
                bound=bound,
                fact=fact,
            )
        )
    return rules


def _inapplicable(
    constraint: Constraint,
    facts: Mapping[str, int],
    axes: Sequence[str],
    knobs: Mapping[str, Sequence[Scalar]],
) -> str:
    """Why a constraint cannot be applied to this step, to follow its name; empty if it can."""
    for name in constraint.factors:
        if name in axes:
            continue
        if name not in knobs:
            known = did_you_mean(name, [*axes, *knobs])
            return f"names `{name}`, which is neither an axis nor a knob of `build`{known}"
        if not all(type(value) is int and value > 0 for value in knobs[name]):
            return f"needs positive integers, but the knob `{name}` takes {list(knobs[name])}"
    bound = constraint.bound
    if isinstance(bound, str) and bound not in facts:
        known = did_you_mean(bound, facts)
        return f"refers to the fact `{bound}`, which the workload does not state{known}"
    return ""
