"""From a search space and what the step says of itself to legal plans, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from automesh.errors import NoFeasibleMesh, UsageError
from automesh.mesh.axes import MeshAxis, Plan, Scalar
from automesh.outcomes import RuledOut
from automesh.space.constraints import rules_of_constraints
from automesh.space.enumerate import MeshTable, enumerate_meshes
from automesh.space.rules import Rule, Sizes, rules_of_axes
from automesh.space.settings import Setting, StepFacts, combine_settings, integers_of, known_knobs
from automesh.space.space import SearchSpace

MAX_PLANS = 1_000_000
Mesh = tuple[MeshAxis, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """How many plans a rule was the first to reject, with one of them and its numbers."""

    rule: str
    count: int
    example: Plan
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumeration:
    """Every plan, legal or counted under the first rule that rejected it.

    Attributes:
      legal: default knobs first, then those with fewer settings changed; meshes in one fixed order.
      num_meshes: factorizations of the devices before rules.
      num_plans: meshes times settings: `len(legal)` plus the counts of `rejections`.
      rejections: most frequent first.
      rules: all rules, in the order in which they are tried.
      defaults: what `build` gets for knobs that a plan does not set.
      notices: what of a shipped space does not apply to this step, one sentence each.
    """

    legal: tuple[Plan, ...]
    num_meshes: int
    num_plans: int
    rejections: tuple[Rejection, ...]
    rules: tuple[Rule, ...]
    defaults: tuple[tuple[str, Scalar], ...]
    notices: tuple[str, ...] = ()

    def reasons_against(self, plan: Plan) -> tuple[RuledOut, ...]:
        """Every rule that a plan breaks, with its numbers; empty if it is legal."""
        values = {**integers_of(self.defaults), **integers_of(plan.knobs), **plan.sizes}
        arrays = {name: np.array(value, np.int64) for name, value in values.items()}
        return tuple(
            RuledOut(rule=rule.name, detail=rule.detail(values))
            for rule in self.rules
            if not rule.holds(arrays)
        )


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
      UsageError: no devices; or, in a user's own space, a knob or fact that the step does not have.
      NoFeasibleMesh: no plan is legal; the message counts the rules that rejected them.
    """
    notices: list[str] = []
    knobs = known_knobs(space, step, notices)
    settings = combine_settings(knobs, space.options_for(platform), dict(step.knobs))
    rules = [*rules_of_axes(space.axes, step.used_axes)]
    rules += rules_of_constraints(space, step, knobs, notices)
    table = enumerate_meshes(space.axes, num_devices=num_devices, num_granules=num_granules)
    legal: list[Plan] = []
    meshes: dict[int, Mesh] = {}  # Shared by the plans of all settings.
    tally = _Tally(rules)
    for setting, (broken, values) in zip(
        settings, _verdicts(space, step, table, rules, settings), strict=True
    ):
        tally.add(broken, values, table, space, setting)
        rows = np.flatnonzero(broken == len(rules))
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
        rules=tuple(rules),
        defaults=step.knobs,
        notices=tuple(notices),
    )


class _Tally:
    """Counts rejected plans by rule and keeps the first of each."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._counts = np.zeros(len(rules) + 1, np.int64)
        self._examples: dict[int, tuple[Plan, str]] = {}

    def add(
        self,
        broken: NDArray[np.int64],
        values: Mapping[str, Sizes],
        table: MeshTable,
        space: SearchSpace,
        setting: Setting,
    ) -> None:
        found, first_rows, counts = np.unique(broken, return_index=True, return_counts=True)
        self._counts[found] += counts
        for index, row in zip(found.tolist(), first_rows.tolist(), strict=True):
            if index < len(self._rules) and index not in self._examples:
                numbers = {
                    name: int(np.broadcast_to(v, len(table))[row]) for name, v in values.items()
                }
                detail = self._rules[index].detail(numbers)
                self._examples[index] = (_plan(space, table, row, setting, {}), detail)

    def rejections(self) -> tuple[Rejection, ...]:
        found = [
            Rejection(
                rule=self._rules[index].name,
                count=int(self._counts[index]),
                example=example,
                detail=detail,
            )
            for index, (example, detail) in sorted(self._examples.items())
        ]
        return tuple(sorted(found, key=lambda rejection: -rejection.count))


def _verdicts(
    space: SearchSpace,
    step: StepFacts,
    table: MeshTable,
    rules: Sequence[Rule],
    settings: Sequence[Setting],
) -> Iterable[tuple[NDArray[np.int64], Mapping[str, Sizes]]]:
    """For each setting: the first rule that each mesh breaks (by index), and what rules look at."""
    one = np.ones(len(table), np.int64)
    sizes = dict.fromkeys(space.names, one)
    sizes |= {axis.name: table.sizes[:, index] for index, axis in enumerate(space.axes)}
    factors = {name for rule in rules for name in rule.factors} - set(sizes)
    known: dict[tuple[tuple[str, int], ...], tuple[NDArray[np.int64], Mapping[str, Sizes]]] = {}
    for setting in settings:
        integers = {**integers_of(step.knobs), **integers_of(setting.knobs)}
        key = tuple(sorted((name, integers[name]) for name in factors))
        if key not in known:
            values = sizes | {name: one * value for name, value in key}
            broken = np.full(len(table), len(rules), np.int64)
            for index in reversed(range(len(rules))):
                broken[~rules[index].holds(values)] = index
            known[key] = (broken, values)
        yield known[key]


def _plan(
    space: SearchSpace, table: MeshTable, row: int, setting: Setting, known: dict[int, Mesh]
) -> Plan:
    if row not in known:
        parts = {
            axis.name: (int(table.ici[row, index]), int(table.dcn[row, index]))
            for index, axis in enumerate(space.axes)
        }
        known[row] = tuple(_axis(name, *parts.get(name, (1, 1))) for name in space.names)
    return Plan(axes=known[row], knobs=setting.knobs, compiler_options=setting.compiler_options)


@cache
def _axis(name: str, ici: int, dcn: int) -> MeshAxis:
    return MeshAxis(name=name, ici=ici, dcn=dcn)


def _why_nothing(rejections: Sequence[Rejection], num_devices: int, num_meshes: int) -> str:
    counts = ", ".join(f"{one.count} by `{one.rule}` ({one.detail})" for one in rejections)
    plural = "es" if num_meshes != 1 else ""
    return (
        f"of {num_meshes} mesh{plural} on {num_devices} devices none is legal; ruled out: {counts}"
    )
