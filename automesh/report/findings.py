"""Findings in words: what a compiler does to a step that nobody asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from automesh.cost.terms import Finding, Terms, value_of
from automesh.mesh.axes import Plan
from automesh.report.words import count
from automesh.texts.terminal import clean
from automesh.units import format_bytes

_MOST = 4


def sentence(finding: Finding, sizes: Mapping[str, int]) -> str:
    """What a finding is on one mesh.

    Args:
      sizes: of its axes.
    """
    at = f" ({clean(finding.source)})" if finding.source else ""
    return f"{RULES[finding.rule](finding, sizes)}{at}"


def _full(finding: Finding, sizes: Mapping[str, int]) -> str:
    return (
        f"full rematerialization: to split {clean(finding.array)} otherwise XLA gathers all of it "
        f"over {_axes(finding)}, {_bytes(finding, sizes)} on every device{_times(finding, sizes)}, "
        "and cuts it again; constrain it in two steps that each move one dimension"
    )


def _stack(finding: Finding, sizes: Mapping[str, int]) -> str:
    return (
        f"layer-split stack: {clean(finding.array)} is split over its layers by {_axes(finding)}, "
        f"and the loop over them gathers all of it, {_bytes(finding, sizes)} on every device"
        f"{_times(finding, sizes)}; split another dimension"
    )


def _second_compile(finding: Finding, sizes: Mapping[str, int]) -> str:
    lost = _bytes(finding, sizes)
    donation = f", and its first call cannot reuse {lost} that are donated" if finding.bytes else ""
    return (
        f"second compile: {clean(finding.array)} comes back split over {_axes(finding)} otherwise "
        f"than it went in, so that the second call compiles another program{donation}; state "
        "`out_shardings` for it, or split the argument like the result"
    )


def _type(finding: Finding, sizes: Mapping[str, int]) -> str:
    return (
        f"the state changes its type: {clean(finding.array)} comes back in another type than it "
        f"went in: {_bytes(finding, sizes)} on a device are donated and not reused, and the next "
        "call compiles another program or fails; convert it back"
    )


def _donation(finding: Finding, sizes: Mapping[str, int]) -> str:
    return (
        f"lost donation: {clean(finding.array)} is donated and no output replaces it: "
        f"{_bytes(finding, sizes)} on a device are not reused, and it is made anew for every step"
    )


RULES: Mapping[str, Callable[[Finding, Mapping[str, int]], str]] = {
    "full-rematerialization": _full,
    "layer-split-stack": _stack,
    "second-compile": _second_compile,
    "state-changes-type": _type,
    "lost-donation": _donation,
}
# A plan that has one of these is not the loop that the user means to run: a rule says so.
BROKEN = frozenset(("state-changes-type", "lost-donation"))


def _axes(finding: Finding) -> str:
    return "+".join(finding.axes) or "no axis"


def _bytes(finding: Finding, sizes: Mapping[str, int]) -> str:
    return format_bytes(value_of(finding.bytes, sizes))


def _times(finding: Finding, sizes: Mapping[str, int]) -> str:
    times = round(value_of(finding.count, sizes))
    return f", {times} times a step" if times > 1 else ""


@dataclass(slots=True)
class _Seen:
    """One finding of some plans: how many, and the fastest of them."""

    plans: int
    step_s: float
    plan: Plan
    finding: Finding


@dataclass(slots=True)
class FindingsOfPlans:
    """Findings of all plans of a search, by rule and line.

    >>> FindingsOfPlans().notices(0)
    ()
    """

    _seen: dict[tuple[str, str, str], _Seen] = field(default_factory=dict)

    def add(self, plan: Plan, step_s: float, terms: Terms) -> None:
        """Takes in what was found for a plan."""
        for finding in terms.findings:
            key = (finding.rule, finding.source, finding.array)
            seen = self._seen.get(key)
            if seen is None:
                self._seen[key] = _Seen(1, step_s, plan, finding)
                continue
            seen.plans += 1
            if step_s < seen.step_s:
                seen.step_s, seen.plan, seen.finding = step_s, plan, finding

    def notices(self, plans: int) -> tuple[str, ...]:
        """One sentence each, those of the fastest plans first.

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
