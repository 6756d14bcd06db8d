"""Finds the plan from which a search on real devices begins: that of a rule that was only
compiled."""

from __future__ import annotations

from pathlib import Path

from automesh.mesh.axes import Plan, format_setting
from automesh.mesh.config import Rules
from automesh.mesh.rules.file import read_rules
from automesh.mesh.rules.rule import MeshRule, first_match
from automesh.tuner.paths import as_seen
from automesh.tuner.preparation import LegalPlans, Preparation
from automesh.tuner.request import SearchRequest
from automesh.units import format_seconds


def promised_plans(
    request: SearchRequest, preparation: Preparation, legal: LegalPlans
) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """Returns the plan of the rule for these devices, if the rule was compiled but not measured.

    Returns:
      The plan or nothing, and notices for the user.

    Raises:
      UsageError: the rules file is broken.
    """
    path = Path(request.rules) if request.rules else None
    if path is None or not path.is_file():
        return (), ()
    rules = read_rules(path)
    index = first_match(rules.rules, preparation.selector)
    if index == len(rules.rules) or rules.rules[index].evidence.kind != "compiled":
        return (), ()
    rule = rules.rules[index]
    plan = _plan_of(rule, rules, preparation, legal)
    text = _text(rule, rules)
    if plan is None:
        return (), (
            f"the rule for {preparation.selector} in {as_seen(path)} promises {text}, which is no "
            "legal plan here: it is not tried",
        )
    when = f", {format_seconds(rule.evidence.step_s)} predicted" if rule.evidence.step_s else ""
    return (plan,), (
        f"the search starts from {plan}{when}, the rule for {preparation.selector} in "
        f"{as_seen(path)}, which rests on a compile alone",
    )


def measured_rule(path: Path, selector: str) -> bool:
    """Whether a rules file has a measured rule for a target.

    Raises:
      UsageError: the rules file is broken.
    """
    if not path.is_file():
        return False
    rules = read_rules(path).rules
    index = first_match(rules, selector)
    return index < len(rules) and rules[index].evidence.kind == "measured"


def _plan_of(
    rule: MeshRule, rules: Rules, preparation: Preparation, legal: LegalPlans
) -> Plan | None:
    """Returns the legal plan that a rule means; None if there is none."""
    sizes = dict(zip(rules.axes_of(rule), _pairs(rule), strict=True))
    defaults = dict(preparation.inspection.knobs)

    def is_meant(plan: Plan) -> bool:
        mine = {axis.name: (axis.ici, axis.dcn) for axis in plan.axes}
        known = {name: pair for name, pair in sizes.items() if name in mine}
        if known != mine or any(sizes[name] != (1, 1) for name in sizes if name not in mine):
            return False
        # A knob that the plan or the rule leaves out has `build`'s own default.
        if plan.mapping != rule.mapping.axes:
            return False
        knobs = {**defaults, **dict(plan.knobs)}
        return knobs == {**defaults, **rule.knobs} and dict(plan.compiler_options) == dict(
            rule.compiler_options
        )

    return next((plan for plan in legal.plans if is_meant(plan)), None)


def _pairs(rule: MeshRule) -> list[tuple[int, int]]:
    shape = rule.hybrid_shape
    return list(zip(shape.ici_mesh_shape, shape.dcn_mesh_shape, strict=True))


def _text(rule: MeshRule, rules: Rules) -> str:
    sizes = list(zip(rules.axes_of(rule), _pairs(rule), strict=True))
    parts = [f"dcn.{name}:{dcn}" for name, (_, dcn) in sizes if dcn != 1]
    parts += [f"{name}:{ici}" for name, (ici, _) in sizes if ici != 1]
    mesh = ",".join(parts) or f"{rules.axes_of(rule)[0]}:1"
    settings = Plan(
        axes=(),
        mapping=rule.mapping.axes,
        knobs=tuple(rule.knobs.items()),
        compiler_options=tuple(rule.compiler_options.items()),
    ).settings
    return " ".join([mesh, *(format_setting(*setting) for setting in settings)])
