"""Findings in words: what a compiler does to a step that nobody asked for, why, and the cure.

`RULES` has the rules of `ir.findings` by their names; docs/lint.md has an example of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from automesh.cost.terms import Finding, Terms, value_of
from automesh.ir.findings import registry
from automesh.ir.findings.rule import Rule, Sizes
from automesh.mesh.axes import Plan
from automesh.report.words import count
from automesh.texts.terminal import clean

RULES: Mapping[str, Rule] = {rule.name: rule for rule in registry.RULES}
# A plan that has one of these is not the loop that the user means to run: a rule says so.
BROKEN = frozenset(rule.name for rule in registry.RULES if rule.is_broken)
_MOST = 4


def sentence(finding: Finding, sizes: Sizes) -> str:
    """Says what a finding is on one mesh, and its cure.

    Args:
      sizes: of its axes.
    """
    words = RULES[finding.rule]
    at = f" ({clean(finding.source)})" if finding.source else ""
    return f"{words.title}: {words.what(finding, sizes)}; {words.cure(finding)}{at}"


# As in `f32[8,128]`, or several of them.
_SHAPE = re.compile(r"[a-z0-9]+\[[\d,]*\]( and \d+ more)?$")


@dataclass(slots=True)
class _Seen:
    """A finding of several plans: how many have it, and the fastest of them."""

    plans: int
    step_s: float
    plan: Plan
    finding: Finding


def _named(finding: Finding) -> str:
    """Returns the name of an argument or a result; empty for an array that has only a shape: a line
    makes many of these, and other ones for each knob."""
    return "" if finding.source and _SHAPE.match(finding.array) else finding.array


def _cost(finding: Finding, plan: Plan) -> float:
    """Returns the bytes of all executions in a step."""
    return value_of(finding.bytes, plan.sizes) * value_of(finding.count, plan.sizes)


@dataclass(slots=True)
class FindingsOfPlans:
    """The findings of all plans of a search, by rule and line.

    Attributes:
      left_out: names of rules whose findings are not shown.

    >>> FindingsOfPlans().notices(0)
    ()
    """

    left_out: frozenset[str] = frozenset()
    _seen: dict[tuple[str, str, str], _Seen] = field(default_factory=dict)

    def add(self, plan: Plan, step_s: float, terms: Terms) -> None:
        """Adds the findings of a plan; of several arrays at one line the costliest."""
        largest: dict[tuple[str, str, str], Finding] = {}
        for finding in terms.findings:
            if finding.rule not in self.left_out and finding.is_on(plan.sizes):
                key = (finding.rule, finding.source, _named(finding))
                known = largest.get(key)
                if known is None or _cost(known, plan) < _cost(finding, plan):
                    largest[key] = finding
        for key, finding in largest.items():
            seen = self._seen.get(key)
            if seen is None:
                self._seen[key] = _Seen(1, step_s, plan, finding)
                continue
            seen.plans += 1
            if step_s < seen.step_s:
                seen.step_s, seen.plan, seen.finding = step_s, plan, finding

    def notices(self, plans: int) -> tuple[str, ...]:
        """Returns one sentence for each finding, those of the fastest plans first.

        Args:
          plans: all that have an estimate.
        """
        ranked = sorted(self._seen.values(), key=lambda seen: seen.step_s)
        said = [
            f"{sentence(seen.finding, seen.plan.sizes)} "
            f"[{'all' if seen.plans == plans else seen.plans} of {count(plans, 'plan')}, "
            f"here {clean(str(seen.plan))}]"
            for seen in ranked[:_MOST]
        ]
        if len(ranked) > _MOST:
            said.append(f"{count(len(ranked) - _MOST, 'more finding')} of this kind in other plans")
        return tuple(said)
