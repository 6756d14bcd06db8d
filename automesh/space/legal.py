"""Finds the legal plans of a search space and a step, and says why others are not legal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from automesh.errors import NoFeasibleMesh, UsageError, did_you_mean
from automesh.mesh.axes import Knobs, MeshAxis, Plan, Scalar
from automesh.mesh.mapping import LogicalAxes
from automesh.mesh.plan_arrays import Batch, Sizes
from automesh.outcomes import RuledOut
from automesh.space.conditions import SpaceRule, rules_of_axes
from automesh.space.enumerate import enumerate_meshes
from automesh.space.mapping import (
    Never,
    Repeats,
    conditions_of,
    explain_repeat,
    known_logical,
    used_axes_of,
)
from automesh.space.pipelines import OnePipeline, Runnable, numbers_of, rules_of_pipelines
from automesh.space.settings import PlanSetting, StepFacts, combine_settings, known_knobs
from automesh.space.space import AxisRange, Constraint, Knob, LogicalAxis, SearchSpace

MAX_PLANS = 1_000_000
_MOST_RULES = 8  # rejections that the error of an empty space names
REPEATED = "mapping that is another one's on the mesh"
Mesh = tuple[MeshAxis, ...]
Condition = SpaceRule | Never | OnePipeline | Runnable


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The number of plans that a rule was the first to reject, with one of them and its numbers."""

    rule: str
    count: int
    example: Plan
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions for plans, in the order in which they are checked."""

    axes: tuple[AxisRange, ...]
    step: StepFacts
    logical: tuple[LogicalAxis, ...]
    constraints: tuple[Condition, ...]

    def of(self, mapping: LogicalAxes, knobs: Knobs) -> tuple[Condition, ...]:
        """Returns the rules for plans with one mapping and these knobs."""
        used, whole = {*self.step.used_axes}, self.step.mapping
        if not self.logical or whole is None:
            return (*rules_of_axes(self.axes, used), *self.constraints)
        step = whole.at(knobs)
        choices = [(one.name, choice) for one in self.logical for choice in one.choices]
        return (
            *rules_of_axes(
                self.axes,
                used | used_axes_of(mapping, step),
                sometimes=used_axes_of(choices, whole),
            ),
            *conditions_of(mapping, step),
            *self.constraints,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    """All plans: legal, or counted under the first rule that rejected them.

    Attributes:
      legal: default knobs first, then those with fewer settings changed; meshes in one fixed order.
      num_meshes: factorizations of the devices before rules.
      num_plans: meshes times settings: `len(legal)` plus the counts of `rejections`.
      rejections: most frequent first.
      conditions: the conditions that each plan was checked with.
      mapping: the default mapping of the logical axes; empty if none is searched.
      defaults: arguments of `build` for knobs that a plan does not set.
      notices: parts of a shipped space that do not apply to this step, one sentence each.
    """

    legal: tuple[Plan, ...]
    num_meshes: int
    num_plans: int
    rejections: tuple[Rejection, ...]
    conditions: Conditions
    mapping: LogicalAxes
    defaults: Knobs
    notices: tuple[str, ...] = ()

    def reasons_against(self, plan: Plan) -> tuple[RuledOut, ...]:
        """Lists every rule that a plan breaks, with its numbers; empty if the plan is legal."""
        knobs = tuple({**dict(self.defaults), **dict(plan.knobs)}.items())
        values = {**numbers_of(knobs), **plan.sizes}
        arrays = {name: np.array(value, np.int64) for name, value in values.items()}
        return tuple(
            RuledOut(rule=rule.name, detail=rule.detail(values))
            for rule in self.conditions.of(plan.mapping, knobs)
            if not rule.holds(arrays)
        )

    def without(self, refused: Mapping[Plan, RuledOut]) -> Enumeration:
        """Returns the enumeration without plans that turned out not to be legal.

        Raises:
          NoFeasibleMesh: no other plan is left.
        """
        legal = tuple(plan for plan in self.legal if plan not in refused)
        found = {rejection.rule: rejection for rejection in self.rejections}
        for plan in self.legal:
            if (why := refused.get(plan)) is None:
                continue
            fresh = Rejection(rule=why.rule, count=0, example=plan, detail=why.detail)
            known = found.get(why.rule, fresh)
            found[why.rule] = replace(known, count=known.count + 1)
        rejections = tuple(sorted(found.values(), key=lambda one: -one.count))
        if not legal:
            raise NoFeasibleMesh(
                _why_nothing(rejections, self.legal[0].num_devices, self.num_meshes),
                hint="let the step take other meshes, or change the number of devices",
            )
        return replace(self, legal=legal, rejections=rejections)


def find_legal(
    space: SearchSpace,
    step: StepFacts,
    *,
    num_devices: int,
    num_granules: int = 1,
    platform: str,
) -> Enumeration:
    """Enumerates every plan of the space and sorts the legal ones from the others.

    Args:
      platform: cpu, gpu or tpu: whose compiler options are tried.

    Raises:
      UsageError: no devices; or, in a user's own space, a knob, fact or logical axis that the step
        does not have.
      NoFeasibleMesh: no plan is legal; the message counts the rules that rejected them.
    """
    notices: list[str] = []
    knobs = known_knobs(space, step, notices)
    logical = known_logical(space, step.mapping, notices)
    settings = combine_settings(logical, knobs, space.options_for(platform), dict(step.knobs))
    notices += _unused_notice(space, step, logical)
    conditions = Conditions(
        axes=space.axes,
        step=step,
        logical=logical,
        constraints=(
            *rules_of_constraints(space, step, knobs, notices),
            *_of_pipelines(space, step, knobs),
        ),
    )
    table = enumerate_meshes(space.axes, num_devices=num_devices, num_granules=num_granules)
    repeats = Repeats(axes=table.names, sizes=table.sizes) if logical else None
    legal: list[Plan] = []
    meshes: dict[int, Mesh] = {}  # Shared by the plans of all settings.
    tally = _Tally()
    for setting, rules, broken, values in _verdicts(space, step, table, conditions, settings):
        tally.add(broken, values, table, space, setting, rules)
        rows = np.flatnonzero(broken == len(rules))
        if repeats is not None:
            others = (setting.knobs, setting.compiler_options)
            is_fresh = repeats.fresh(setting.mapping, others, rows)
            tally.add_repeats(rows[~is_fresh], table, space, setting)
            rows = rows[is_fresh]
        if len(legal) + len(rows) > MAX_PLANS:
            raise UsageError(
                f"the search space `{space.name}` has more than {MAX_PLANS} legal plans",
                hint="give its knobs fewer values, or bound its axes",
            )
        legal += [_plan(space, table, row, setting, meshes) for row in rows.tolist()]
    if not legal:
        raise NoFeasibleMesh(
            _why_nothing(tally.rejections(), num_devices, len(table)),
            hint="loosen the rules of the search space, or change the number of devices",
        )
    return Enumeration(
        legal=tuple(legal),
        num_meshes=len(table),
        num_plans=len(table) * len(settings),
        rejections=tally.rejections(),
        conditions=conditions,
        mapping=settings[0].mapping,
        defaults=step.knobs,
        notices=tuple(notices),
    )


def _unused_notice(
    space: SearchSpace, step: StepFacts, logical: Sequence[LogicalAxis]
) -> list[str]:
    """Says which axes of a shipped space are in the mesh but unused."""
    if not space.shipped:
        return []
    used = {*step.used_axes}
    if step.mapping is not None:
        choices = [(one.name, choice) for one in logical for choice in one.choices]
        used |= used_axes_of(choices, step.mapping)
    unused = [name for name in space.names if name not in used]
    if not unused:
        return []
    axes, they, them = ("axis", "it is", "it") if len(unused) == 1 else ("axes", "they are", "them")
    if step.is_captured:
        return [
            f"the step splits no array over the {axes} {', '.join(unused)} of the script's mesh, "
            f"so that devices along {them} do the same work: other meshes have {them} at size 1"
        ]
    return [
        f"the mesh that `build` gets also has the {axes} {', '.join(unused)} of size 1: {they} in "
        f"the space `{space.name}`, and the step never uses {them}"
    ]


def _of_pipelines(
    space: SearchSpace, step: StepFacts, knobs: Sequence[Knob]
) -> tuple[Condition, ...]:
    """Makes the rules of pipelines, with each knob's default first, if the search tries it."""
    defaults = dict(step.knobs)
    values: dict[str, Sequence[Scalar]] = {name: (value,) for name, value in step.knobs}
    for knob in knobs:
        is_tried = defaults.get(knob.name) in knob.values
        first = (defaults[knob.name],) if is_tried else ()
        values[knob.name] = (*first, *knob.values)
    return rules_of_pipelines([axis.name for axis in space.axes], values)


class _Tally:
    """Counts rejected plans by rule and keeps the first of each."""

    def __init__(self) -> None:
        self._found: dict[str, Rejection] = {}

    def add(
        self,
        broken: NDArray[np.int64],
        values: Mapping[str, Sizes],
        table: Batch,
        space: SearchSpace,
        setting: PlanSetting,
        rules: Sequence[Condition],
    ) -> None:
        found, first_rows, counts = np.unique(broken, return_index=True, return_counts=True)
        for index, row, count in zip(
            found.tolist(), first_rows.tolist(), counts.tolist(), strict=True
        ):
            if index == len(rules):
                continue
            rule = rules[index]
            if rule.name in self._found:
                self._add(rule.name, count)
                continue
            numbers = {name: int(np.broadcast_to(v, len(table))[row]) for name, v in values.items()}
            example = _plan(space, table, row, setting, {})
            self._add(rule.name, count, example, rule.detail(numbers))

    def add_repeats(
        self, rows: NDArray[np.int64], table: Batch, space: SearchSpace, setting: PlanSetting
    ) -> None:
        """Counts plans that an earlier mapping makes, too."""
        if len(rows):
            example = _plan(space, table, int(rows[0]), setting, {})
            self._add(REPEATED, len(rows), example, explain_repeat(setting.mapping))

    def _add(self, rule: str, count: int, example: Plan | None = None, detail: str = "") -> None:
        known = self._found.get(rule)
        if known is not None:
            self._found[rule] = replace(known, count=known.count + count)
        elif example is not None:
            self._found[rule] = Rejection(rule=rule, count=count, example=example, detail=detail)

    def rejections(self) -> tuple[Rejection, ...]:
        return tuple(sorted(self._found.values(), key=lambda rejection: -rejection.count))


_Verdict = tuple[NDArray[np.int64], Mapping[str, Sizes]]


def _verdicts(
    space: SearchSpace,
    step: StepFacts,
    table: Batch,
    conditions: Conditions,
    settings: Sequence[PlanSetting],
) -> Iterable[tuple[PlanSetting, Sequence[Condition], NDArray[np.int64], Mapping[str, Sizes]]]:
    """Yields for each setting its rules, the first that each mesh breaks (by index), and
    numbers."""
    one = np.ones(len(table), np.int64)
    sizes = dict.fromkeys(space.names, one)
    sizes |= dict(zip(table.names, table.sizes.T, strict=True))
    telling = step.mapping.telling if step.mapping else frozenset[str]()
    rules_of: dict[object, tuple[Condition, ...]] = {}
    known: dict[object, _Verdict] = {}
    for setting in settings:
        # In words: True == 1.
        told = tuple((name, repr(one)) for name, one in setting.knobs if name in telling)
        if (setting.mapping, told) not in rules_of:
            knobs = tuple({**dict(step.knobs), **dict(setting.knobs)}.items())
            rules_of[setting.mapping, told] = conditions.of(setting.mapping, knobs)
        rules = rules_of[setting.mapping, told]
        factors = {name for rule in rules for name in rule.factors} - set(sizes)
        integers = {**numbers_of(step.knobs), **numbers_of(setting.knobs)}
        key = tuple(sorted((name, integers[name]) for name in factors))
        if (setting.mapping, told, key) not in known:
            values = sizes | {name: one * value for name, value in key}
            broken = np.full(len(table), len(rules), np.int64)
            for index in reversed(range(len(rules))):
                broken[~rules[index].holds(values)] = index
            known[setting.mapping, told, key] = (broken, values)
        yield setting, rules, *known[setting.mapping, told, key]


def _plan(
    space: SearchSpace, table: Batch, row: int, setting: PlanSetting, known: dict[int, Mesh]
) -> Plan:
    if row not in known:
        sizes = zip(table.ici[row].tolist(), table.dcn[row].tolist(), strict=True)
        parts = dict(zip(table.names, sizes, strict=True))
        known[row] = tuple(_axis(name, *parts.get(name, (1, 1))) for name in space.names)
    return Plan(
        axes=known[row],
        mapping=setting.mapping,
        knobs=setting.knobs,
        compiler_options=setting.compiler_options,
    )


@cache
def _axis(name: str, ici: int, dcn: int) -> MeshAxis:
    return MeshAxis(name=name, ici=ici, dcn=dcn)


def _why_nothing(rejections: Sequence[Rejection], num_devices: int, num_meshes: int) -> str:
    said = [
        f"{rejection.count} by `{rejection.rule}` ({rejection.detail})"
        for rejection in rejections[:_MOST_RULES]
    ]
    if rest := rejections[_MOST_RULES:]:
        others = "another rule" if len(rest) == 1 else f"{len(rest)} other rules"
        said.append(f"{sum(one.count for one in rest)} by {others}")
    counts = ", ".join(said)
    plural = "es" if num_meshes != 1 else ""
    return (
        f"of {num_meshes} mesh{plural} on {num_devices} devices none is legal; ruled out: {counts}"
    )


# Applies the constraints of a search space to the facts of one step.


def rules_of_constraints(
    space: SearchSpace, step: StepFacts, knobs: Sequence[Knob], notices: list[str]
) -> list[SpaceRule]:
    """Makes rules of constraints; those that do not apply become notices (shipped space) or errors.

    Raises:
      UsageError: a user's own space names a fact or factor that the step lacks; a fact is below 1.
    """
    facts = dict(step.facts)
    values: dict[str, Sequence[Scalar]] = {name: (value,) for name, value in step.knobs}
    values |= {knob.name: knob.values for knob in knobs}
    rules: list[SpaceRule] = []
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
            SpaceRule(
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
    """Says why a constraint cannot be applied to this step, to follow its name; else empty."""
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
