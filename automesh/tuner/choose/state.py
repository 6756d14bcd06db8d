"""What a search knows at one moment, and what follows for the plans that are left (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from automesh.hardware import Chip
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Failure, Measured, Outcome
from automesh.tuner.choose.beliefs import View, compile_order, view_of
from automesh.tuner.choose.certificate import (
    Chance,
    belief,
    certificate,
    chances_of,
    excluded_by_bound,
)
from automesh.tuner.choose.partly_counted import partly_counted, wholly_counted
from automesh.tuner.choose.ranking import may_be_exported
from automesh.tuner.preparation import LegalPlans, Preparation


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchState:
    """All plans of a search, with what each rung has said of them so far.

    Attributes:
      plans: the baseline among them.
      estimates: by propagation and formula; plans without one are blind, and so are those whose
        estimate leaves out work that others' do not.
      programs: what the compiler said; of absent devices, at low effort.
      results: what decides: what was measured; of absent devices, what was compiled at default
        effort and replayed.
      baseline: the script's own plan, or nothing.
      promised: what a rule promises that was only compiled so far, or nothing: it is raced, too.
      usual: a plan with the default knobs and compiler options.
      top: finalists of a race, or plans to compile for absent devices; the baseline not counted.
      device_memory_bytes: 0 where nobody says.
      is_replayed: True for absent devices, where nothing is run.
    """

    plans: Sequence[Plan]
    estimates: Mapping[Plan, Estimated]
    programs: Mapping[Plan, Outcome]
    results: Mapping[Plan, Outcome]
    baseline: Sequence[Plan]
    usual: Plan
    chip: Chip
    top: int
    device_memory_bytes: int
    promised: Sequence[Plan] = ()
    is_replayed: bool = False

    def knowing(
        self, programs: Mapping[Plan, Outcome], results: Mapping[Plan, Outcome]
    ) -> SearchState:
        """The same plans with what is known of them now."""
        return replace(self, programs=programs, results=results)

    @property
    def first(self) -> tuple[Plan, ...]:
        """Plans that are compiled and raced whatever is thought of them."""
        return tuple(dict.fromkeys([*self.baseline, *self.promised]))

    def view(self) -> View:
        """What is believed of all plans."""
        # A program at low effort says nothing of the time that it takes.
        chip = None if self.is_replayed else self.chip
        return view_of(self.plans, self.estimates, self.programs, self.results, chip)

    def order(self, plans: Sequence[Plan], view: View) -> tuple[Plan, ...]:
        """The plans in the order in which to compile them."""
        return compile_order(
            plans,
            view,
            self.estimates,
            self.programs,
            usual=self.usual,
            first=self.first,
            device_memory_bytes=self.device_memory_bytes,
        )

    def excluded(self) -> frozenset[Plan]:
        """Plans that cannot be the fastest, by the sound bound."""
        return excluded_by_bound(self.estimates, self.results)

    def left(self) -> tuple[Plan, ...]:
        """Plans without a result, of their own or of the same program, that did not fail."""
        known = (self._program(plan) for plan in self.results)
        done = {one.fingerprint for one in known if isinstance(one, Compiled)}

        def is_open(plan: Plan) -> bool:
            program = self.programs.get(plan)
            if plan in self.results or isinstance(program, Failure):
                return False
            return not isinstance(program, Compiled) or program.fingerprint not in done

        return tuple(plan for plan in self.plans if is_open(plan))

    def _program(self, plan: Plan) -> Outcome | None:
        """The program that a plan's result speaks for, if it speaks for more than the plan."""
        result = self.results[plan]
        # A compile that fails may lack the time or the memory that its twin will have.
        return result if self.is_replayed else self.programs.get(plan)

    def best_s(self) -> float | None:
        """Seconds of the fastest plan that may become a rule; None if none may."""
        apart = partly_counted(self.results)
        times = [
            result.step_s
            for plan, result in self.results.items()
            if (isinstance(result, Compiled) and plan not in apart)
            or (isinstance(result, Measured) and may_be_exported(result))
        ]
        return min(times, default=None)

    def chances(
        self, best_s: float | None, among: Sequence[Plan] | None = None
    ) -> tuple[Chance, ...]:
        """How likely each plan that is left beats `best_s`, the likeliest first.

        Args:
          among: of which plans; by default of all that are left and not excluded.
        """
        view = self.view()
        if best_s is None or view.refinement is None:
            return ()
        return chances_of(
            self._may_win() if among is None else among, view.rows, view.refinement, best_s
        )

    def certificate(self, best_s: float) -> str:
        """What is certain of the plans that are left; see `automesh.tuner.choose.certificate`.

        Args:
          best_s: of the winner: times of other races were measured under other conditions.
        """
        return certificate(self.left(), self.estimates, best_s)

    def belief(
        self,
        best_s: float | None,
        among: Sequence[Plan] | None = None,
        *,
        how: Literal["measured", "replayed"] = "measured",
    ) -> str:
        """What the model thinks of the plans that are left; arguments as of `chances`."""
        number = len(self._may_win() if among is None else among)
        return belief(number, self.view().refinement, self.chances(best_s, among), how=how)

    def _may_win(self) -> list[Plan]:
        excluded = self.excluded()
        return [plan for plan in self.left() if plan not in excluded]


def state_of(
    preparation: Preparation,
    legal: LegalPlans,
    estimates: Mapping[Plan, Estimated],
    *,
    plans: Sequence[Plan] | None = None,
    top: int,
) -> SearchState:
    """What a search knows before its first compile.

    Args:
      plans: by default all that are legal, and the baseline.
    """
    return SearchState(
        plans=legal.plans if plans is None else plans,
        estimates=wholly_counted(estimates),
        programs={},
        results={},
        baseline=legal.baseline,
        usual=legal.enumeration.legal[0],
        chip=preparation.chip,
        top=top,
        device_memory_bytes=preparation.aim.memory_bytes,
        promised=legal.promised,
    )
