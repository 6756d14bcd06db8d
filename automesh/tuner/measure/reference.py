"""Whose losses and updates the finalists must reproduce, and whether they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from automesh.mesh.axes import Plan
from automesh.outcomes import Numerics
from automesh.program.nouns import LeafUpdate, VisitAnswer
from automesh.tuner.measure.numerics import Agreement, compare_losses, compare_updates
from automesh.tuner.measure.schedule import (
    Calibration,
    Subject,
    VisitPool,
    VisitRules,
    record_losses,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The losses that others are compared with.

    Attributes:
      name: whose they are, in words.
      plan: the plan itself; nothing where none could be had.
      losses: scalar outputs of the first steps, in order.
      updates: what the first step changes in the arrays that it carries on.
    """

    name: str
    plan: tuple[Plan, ...]
    losses: tuple[float, ...]
    updates: tuple[LeafUpdate, ...] = ()


@dataclass(slots=True)
class Checks:
    """How each plan's losses compare with the reference's."""

    _found: dict[Plan, tuple[Numerics, str]] = field(
        default_factory=dict[Plan, tuple[Numerics, str]]
    )

    def note(self, plan: Plan, numerics: Numerics, detail: str) -> None:
        self._found[plan] = (numerics, detail)

    def of(self, plan: Plan) -> tuple[Numerics, str]:
        return self._found[plan]

    def agrees(self, plan: Plan) -> bool:
        return self._found[plan][0] in ("agree", "reference")


def find_reference(
    pool: VisitPool,
    subject: Subject,
    *,
    baseline: Sequence[Calibration],
    plans: Sequence[Plan],
    rules: VisitRules,
) -> Reference:
    """The baseline's losses, else the step's on one device, else those of a data-parallel plan.

    Args:
      baseline: the baseline's first visit, if there is a baseline and it ran.
      plans: all legal plans; the first has the default knobs.
    """
    for calibration in baseline:
        return Reference(
            name=f"the baseline {calibration.plan}",
            plan=(calibration.plan,),
            losses=calibration.first.losses,
            updates=calibration.first.updates,
        )
    single = replace(plans[0], axes=tuple(replace(axis, ici=1, dcn=1) for axis in plans[0].axes))
    candidates = [("the step on one device", single)]
    # A model that needs sharding fits neither one device nor dp alone: fsdp splits the batch, too.
    first = "dp" if "dp" in single.sizes else single.axes[0].name
    usual = [plan for plan in plans if plan.settings == single.settings]
    for axes in ((first,), (first, "fsdp")):
        parallel = [plan for plan in usual if _splits_only(plan, axes)]
        parallel.sort(key=lambda plan: -plan.sizes.get("fsdp", 1))
        candidates += [(f"the data-parallel plan {plan}", plan) for plan in parallel[:1]]
    for name, plan in candidates:
        answer = record_losses(pool, subject, plan, rules=rules)
        if isinstance(answer, VisitAnswer):
            return Reference(name=name, plan=(plan,), losses=answer.losses, updates=answer.updates)
    return Reference(
        name="none: neither one device nor data parallelism could run the step", plan=(), losses=()
    )


def check(reference: Reference, plan: Plan, answer: VisitAnswer) -> tuple[Numerics, str]:
    """How losses and updates compare with the reference's, and a sentence if they do not agree."""
    found: Agreement = compare_losses(reference.losses, answer.losses, answer.loss_dtype)
    if found.verdict == "agree":
        found = compare_updates(reference.updates, answer.updates, answer.loss_dtype)
    if found.verdict == "agree" and plan in reference.plan:
        return "reference", ""
    if not reference.plan:
        return "unverified", f"there is no reference ({reference.name})"
    return found.verdict, found.detail


def _splits_only(plan: Plan, axes: Sequence[str]) -> bool:
    return all(axis.size == 1 or axis.name in axes for axis in plan.axes)
