"""Which plans are worth a compile or a race, by estimates and what was measured (pure)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from automesh.hardware import Chip
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Failure, Measured, Outcome
from automesh.tuner.choose.beliefs import View, compile_order, view_of
from automesh.tuner.choose.certificate import (
    MAY_WIN,
    Chance,
    belief,
    certificate,
    chances_of,
    excluded_by_bound,
)
from automesh.tuner.choose.ranking import may_be_exported, promising
from automesh.tuner.choose.sampler import LIMIT, propose
from automesh.tuner.preparation import Preparation

COMPILES_PER_FINALIST = 3  # some fail, some are duplicates, some need more memory than estimated


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """All plans of a search, and what was known of them before the first compile.

    Attributes:
      plans: the baseline among them.
      baseline: the script's own plan, or nothing.
      promised: what a rule promises that was only compiled so far, or nothing: it is raced, too.
      top: finalists of a race, the baseline not counted.
      device_memory_bytes: 0 where nobody says.
    """

    plans: Sequence[Plan]
    estimates: Mapping[Plan, Estimated]
    baseline: Sequence[Plan]
    usual: Plan
    chip: Chip
    top: int
    device_memory_bytes: int
    promised: Sequence[Plan] = ()

    @property
    def first(self) -> tuple[Plan, ...]:
        """Plans that are compiled and raced whatever is thought of them."""
        return tuple(dict.fromkeys([*self.baseline, *self.promised]))

    def view(self, compiled: Mapping[Plan, Outcome], measured: Mapping[Plan, Outcome]) -> View:
        """What is believed of all plans now."""
        return view_of(self.plans, self.estimates, compiled, measured, self.chip)

    def order(
        self, plans: Sequence[Plan], view: View, compiled: Mapping[Plan, Outcome]
    ) -> tuple[Plan, ...]:
        """The plans in the order in which to compile them."""
        return compile_order(
            plans,
            view,
            self.estimates,
            compiled,
            usual=self.usual,
            first=self.first,
            device_memory_bytes=self.device_memory_bytes,
        )

    def to_compile(
        self, compiled: Mapping[Plan, Outcome], measured: Mapping[Plan, Outcome], *, wanted: int
    ) -> tuple[Plan, ...]:
        """What to compile before the first race: the best, the baseline, and all the unestimated.

        Where those are too many, a sampler chooses among them.

        Args:
          wanted: how many of the estimated ones, those that are compiled among them.
        """
        excluded = excluded_by_bound(self.estimates, measured)
        open_plans = [plan for plan in self.plans if plan not in excluded]
        view = self.view(compiled, measured)
        ordered = self.order(open_plans, view, compiled)
        blind = [plan for plan in ordered if plan not in self.estimates]
        if len(blind) > LIMIT:
            blind = [
                *(plan for plan in blind if plan in compiled or plan in self.first),
                *self._proposed(blind, view, measured, wanted, excluded=set(compiled)),
            ]
        best = [plan for plan in ordered if plan in self.estimates and plan not in self.first]
        taken = {*self.first, *best[:wanted], *blind}
        return tuple(plan for plan in ordered if plan in taken)

    def _proposed(
        self,
        plans: Sequence[Plan],
        view: View,
        measured: Mapping[Plan, Outcome],
        number: int,
        *,
        excluded: Collection[Plan],
    ) -> tuple[Plan, ...]:
        known = {plan: view.step_s(plan) for plan in view.rows}
        known |= {plan: one.step_s for plan, one in measured.items() if isinstance(one, Measured)}
        among = set(plans)
        others = {plan for plan in self.plans if plan not in among}
        return propose(self.plans, known, number=number, excluded={*others, *excluded})

    def finalists(
        self, compiled: Mapping[Plan, Outcome], measured: Mapping[Plan, Outcome]
    ) -> tuple[Plan, ...]:
        """The plans of the first race: the baseline, what is promised, the best that compiled."""
        view = self.view(compiled, measured)
        return promising(compiled, first=self.first, limit=self.top, seconds=view.step_s)

    def left(
        self, compiled: Mapping[Plan, Outcome], measured: Mapping[Plan, Outcome]
    ) -> tuple[Plan, ...]:
        """Plans that were neither measured, by themselves or as the same program, nor failed."""
        programs = {
            outcome.fingerprint
            for plan in measured
            if isinstance(outcome := compiled.get(plan), Compiled)
        }

        def is_open(plan: Plan) -> bool:
            outcome = compiled.get(plan)
            if plan in measured or isinstance(outcome, Failure):
                return False
            return not isinstance(outcome, Compiled) or outcome.fingerprint not in programs

        return tuple(plan for plan in self.plans if is_open(plan))

    def chances(
        self,
        compiled: Mapping[Plan, Outcome],
        measured: Mapping[Plan, Outcome],
        best_s: float | None,
    ) -> tuple[Chance, ...]:
        """How likely each plan that is left beats `best_s`, the likeliest first."""
        view = self.view(compiled, measured)
        if best_s is None or view.refinement is None:
            return ()
        excluded = excluded_by_bound(self.estimates, measured)
        left = [plan for plan in self.left(compiled, measured) if plan not in excluded]
        return chances_of(left, view.rows, view.refinement, best_s)

    def challengers(
        self, compiled: Mapping[Plan, Outcome], measured: Mapping[Plan, Outcome]
    ) -> tuple[Plan, ...]:
        """The plans that may still win and are worth another race, the likeliest first.

        As long as the model cannot even tell its own error, that is all of which it has a view.
        """
        view = self.view(compiled, measured)
        if view.refinement is None:
            return ()
        knows_little = view.refinement.loo_error is None
        likely = [
            one.plan
            for one in self.chances(compiled, measured, best_seconds(measured))
            if knows_little or one.chance >= MAY_WIN
        ]
        blind = [plan for plan in self.left(compiled, measured) if plan not in view.rows]
        if len(blind) <= LIMIT:
            return tuple(likely)
        # Half of the places for those of which the model has no view.
        half = self.top // 2 or 1
        proposed = self._proposed(blind, view, measured, half, excluded=set(compiled))
        return (*likely[: self.top - half], *proposed, *likely[self.top - half :])

    def raceable(
        self,
        plans: Sequence[Plan],
        compiled: Mapping[Plan, Outcome],
        measured: Mapping[Plan, Outcome],
    ) -> tuple[Plan, ...]:
        """Those of `plans` that compiled to a program that was not measured, each program once."""
        left = set(self.left(compiled, measured))
        known = {plan: compiled[plan] for plan in plans if plan in left and plan in compiled}
        return promising(known, first=(), limit=len(known))

    def certificate(
        self, compiled: Mapping[Plan, Outcome], measured: Mapping[Plan, Outcome], best_s: float
    ) -> str:
        """What is certain of the plans that are left; see `automesh.tuner.choose.certificate`.

        Args:
          best_s: of the winner: times of other races were measured under other conditions.
        """
        return certificate(self.left(compiled, measured), self.estimates, best_s)

    def belief(
        self, compiled: Mapping[Plan, Outcome], measured: Mapping[Plan, Outcome], best_s: float
    ) -> str:
        """What the model thinks of the plans that are left; arguments as of `certificate`."""
        excluded = excluded_by_bound(self.estimates, measured)
        left = [plan for plan in self.left(compiled, measured) if plan not in excluded]
        view = self.view(compiled, measured)
        return belief(len(left), view.refinement, self.chances(compiled, measured, best_s))


def contest_of(preparation: Preparation, estimates: Mapping[Plan, Estimated], top: int) -> Contest:
    """The contest of one search."""
    return Contest(
        plans=preparation.plans,
        estimates=estimates,
        baseline=preparation.baseline,
        usual=preparation.enumeration.legal[0],
        chip=preparation.chip,
        top=top,
        device_memory_bytes=preparation.device_memory_bytes,
        promised=preparation.promised,
    )


def best_seconds(measured: Mapping[Plan, Outcome]) -> float | None:
    """Seconds of the fastest plan that may become a rule; None if none may."""
    times = [
        outcome.step_s
        for outcome in measured.values()
        if isinstance(outcome, Measured) and may_be_exported(outcome)
    ]
    return min(times, default=None)
