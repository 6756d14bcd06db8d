"""The results of the estimate rung for all plans of a search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from automesh.hardware.fabric.fabric import Fabric, Layouts
from automesh.mesh.axes import Plan, format_setting
from automesh.outcomes import Estimated, RuledOut
from automesh.report.so_far import SETTLED, SETTLED_ROWS, common_parts
from automesh.report.words import count

ESTIMATES = "estimates.csv"  # in the folder of a study
# How the reason begins where user code raised while the step was built or traced.
STEP_REFUSES = "the step refuses it"
NO_TIME = "the time for estimates was used up"
INTERRUPTED = "the estimates were interrupted before"
COMPILED_FIRST = f"the first {SETTLED_ROWS}, which are settled, are compiled before"
NOT_YET = (NO_TIME, INTERRUPTED, COMPILED_FIRST)  # what the same command makes up for


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """All plans, each with its estimate or with the reason why it has none.

    Attributes:
      found: plans that have an estimate.
      missing: the others, with one sentence each.
      refused: of the plans that were legal by all rules, those that cannot be built; they are
        neither in `found` nor in `missing`.
      origin: where the speeds come from, in words: `data sheet of TPU v5p`.
      notices: what the user should know, one sentence each.
      details: how the estimates were made, for those who ask.
      propagations: how many propagations the terms come from, those kept from earlier included.
      fabric: how the devices are wired; None if that is unknown.
      layouts: where the meshes of all plans lie on them; None without a fabric, or without a plan.
      is_interrupted: True if somebody has stopped them: they are those that were made until then.
      data_by_mesh: says that the step takes other amounts of data on other meshes; empty if it does
        not, or if that is unknown.
      settled_at: how many plans had an estimate when it was certain that no other one comes among
        the first ten; 0: it was not before the end.
    """

    found: Mapping[Plan, Estimated] = field(default_factory=dict[Plan, Estimated])
    missing: Mapping[Plan, str] = field(default_factory=dict[Plan, str])
    refused: Mapping[Plan, RuledOut] = field(default_factory=dict[Plan, RuledOut])
    origin: str = ""
    notices: tuple[str, ...] = ()
    details: tuple[str, ...] = ()
    propagations: int = 0
    fabric: Fabric | None = None
    layouts: Layouts | None = None
    is_interrupted: bool = False
    data_by_mesh: str = ""
    settled_at: int = 0

    @property
    def refusals(self) -> int:
        """Counts the plans that have no estimate because the step refuses them."""
        return len(self.refused_by_step)

    @property
    def refused_by_step(self) -> frozenset[Plan]:
        """Lists the plans that have no estimate because the step refuses them."""
        return frozenset(
            plan for plan, reason in self.missing.items() if reason.startswith(STEP_REFUSES)
        )

    @property
    def waiting(self) -> frozenset[Plan]:
        """Lists plans without an estimate that another search could estimate."""
        if not self.found:
            return frozenset()
        return self._waiting

    @property
    def _waiting(self) -> frozenset[Plan]:
        return frozenset(plan for plan, reason in self.missing.items() if reason in NOT_YET)

    @property
    def settled_detail(self) -> str:
        """Says how soon the first plans were settled; empty if they were not before the end."""
        if not self.settled_at:
            return ""
        known = f"{self.settled_at} of {count(len(self.found) + len(self.missing), 'plan')}"
        return f"the first {SETTLED_ROWS} plans were settled with {known} estimated"

    @property
    def missing_notice(self) -> str:
        """Says how many plans have no estimate, and why most of them; empty if all have one."""
        if not self.missing:
            return ""
        reason, number = Counter(self.missing.values()).most_common(1)[0]
        if reason in NOT_YET and self.found:
            return self._waiting_notice
        which = f"{number} of them because" if number < len(self.missing) else "because"
        return f"{count(len(self.missing), 'plan')} not estimated, {which}: {reason}"

    @property
    def _waiting_notice(self) -> str:
        """Says what plans that wait for an estimate share, and no estimated plan has."""
        waiting = self._waiting
        known = frozenset(part for plan in self.found for part in _parts(plan))
        plans = count(len(waiting), "plan")
        why = f"{next(iter(self.missing[plan] for plan in waiting))}; the same command goes on"
        if self.settled_at:
            why = f"{why}, but {SETTLED}: none of these can come among them"
        named, others = common_parts(known, Counter(map(_parts, waiting)))
        if not named:
            return f"{plans} not estimated yet, such as {min(map(str, waiting))}: {why}"
        which = f"meshes with {' or '.join(named)}"
        if others:
            mine = [str(plan) for plan in waiting if _parts(plan) in others]
            which = f"{which}, and {count(len(mine), 'plan')}, such as {min(mine)}"
        return f"{which}: not estimated yet ({plans}): {why}"


def _parts(plan: Plan) -> tuple[str, ...]:
    """Returns the axes that a plan uses, and its settings, in words."""
    axes = tuple(axis.name for axis in plan.axes if axis.size > 1)
    return (*axes, *(format_setting(*setting) for setting in plan.settings))
