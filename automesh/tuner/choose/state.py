"""The knowledge of a search at one moment, and its conclusions for the remaining plans (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from automesh.hardware import Chip
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Failure, Measured, Outcome
from automesh.tuner.choose.beliefs import RefinedTimes, compile_order, refined_times
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
    """All plans of a search with their outcomes so far, from each rung.

    Attributes:
      plans: all plans, with the baseline.
      estimates: estimates by propagation and formula; not those that leave out work that others
        include.
      programs: compiled outcomes; for absent devices those at low effort.
      results: the outcomes that decide: measured ones; for absent devices those compiled at default
        effort and replayed.
      baseline: the script's own plan, or nothing.
      promised: the plan of a rule that was only compiled, or nothing; it is raced as well.
      usual: a plan with the default knobs and compiler options.
      top: number of finalists of a race, or of plans to compile for absent devices, without the
        baseline.
      device_memory_bytes: memory of one device; 0 if unknown.
      is_replayed: True for absent devices, for which nothing is run.
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
        """Returns the same plans with newer outcomes."""
        return replace(self, programs=programs, results=results)

    @property
    def first(self) -> tuple[Plan, ...]:
        """Plans that are compiled and raced in any case."""
        return tuple(dict.fromkeys([*self.baseline, *self.promised]))

    def view(self) -> RefinedTimes:
        """Returns the expected times of all plans."""
        # A program at low effort says nothing about its step time.
        chip = None if self.is_replayed else self.chip
        return refined_times(self.plans, self.estimates, self.programs, self.results, chip)

    def order(self, plans: Sequence[Plan], view: RefinedTimes) -> tuple[Plan, ...]:
        """Returns the plans in the order in which to compile them."""
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
        """Returns the plans that cannot be the fastest, according to the sound bound."""
        return excluded_by_bound(self.estimates, self.results)

    def left(self) -> tuple[Plan, ...]:
        """Returns the plans that did not fail and have no result, neither their own nor that of the
        same program."""
        known = (self._program(plan) for plan in self.results)
        done = {one.fingerprint for one in known if isinstance(one, Compiled)}

        def is_open(plan: Plan) -> bool:
            program = self.programs.get(plan)
            if plan in self.results or isinstance(program, Failure):
                return False
            return not isinstance(program, Compiled) or program.fingerprint not in done

        return tuple(plan for plan in self.plans if is_open(plan))

    def _program(self, plan: Plan) -> Outcome | None:
        """Returns the result of a plan that also holds for all plans with the same program; None if
        there is none."""
        result = self.results[plan]
        # A compile may fail for time or memory while one of the same program succeeds.
        return result if self.is_replayed else self.programs.get(plan)

    def best_s(self) -> float | None:
        """Returns the seconds of the fastest exportable plan; None if there is none."""
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
        """Returns the chance of each remaining plan to beat `best_s`, the likeliest first.

        Args:
          among: the plans; by default all remaining ones that are not excluded.
        """
        view = self.view()
        if best_s is None or view.refinement is None:
            return ()
        return chances_of(
            self._may_win() if among is None else among, view.rows, view.refinement, best_s
        )

    def certificate(self, best_s: float, *, once: int = 0) -> str:
        """Returns what is certain about the remaining plans; see
        `automesh.tuner.choose.certificate`.

        Args:
          best_s: step time of the winner; times of other races were measured under other
            conditions.
          once: number of plans that ran in their first visits alone.
        """
        return certificate(self.left(), self.estimates, best_s, once=once)

    def belief(
        self,
        best_s: float | None,
        among: Sequence[Plan] | None = None,
        *,
        how: Literal["measured", "replayed"] = "measured",
    ) -> str:
        """Returns the model's belief about the remaining plans; the arguments are those of
        `chances`."""
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
    """Makes the state of a search before its first compile.

    Args:
      plans: by default all legal plans and the baseline.
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
