"""Predicts which plans fit absent devices, from estimates and compiles.

Pure functions. An estimate of memory is wrong by a factor that is similar for plans with the same
knobs: for an 8B model on TPU v5p the compiler needed 0.68 to 0.71 times the estimate with
`remat=full`, 0.77 to 0.79 times with that and two microbatches, and 0.87 to 0.92 times with
`remat=dots` and two microbatches, on any mesh. So a few compiles correct the estimates of plans
with the same knobs. The prediction only decides which plans are worth a compile; the result states
how many plans were left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from automesh.mesh.axes import Call, Plan
from automesh.outcomes import Compiled, Estimated, Outcome, OutOfMemory
from automesh.report.words import count
from automesh.tuner.compile.memory_limit import DeviceMemory
from automesh.tuner.measure.statistics import t_limit

# An estimate of memory is rarely above the compiler's figure by this factor.
_TOO_LARGE = 1.15
# If no plan with the same knobs was compiled, the next ratio may be smaller than all known ones:
# for two models on v5e and v5p, 394 plans in all, the compiler needed 0.69 to 1.75 times the
# estimate.
_SPREAD = 0.75
_ENOUGH = 5
# The chance that a plan that would fit is left out, among plans with the same knobs.
_MISSED = 0.01
# A lower limit for the standard deviation of the logarithms of the ratios.
_SCATTER = 0.03
# The least degrees of freedom for which that deviation is used.
_LEAST_FREEDOM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBelief:
    """The comparison of memory estimates with the compiles of one search.

    Attributes:
      outcomes: compiled outcomes, judged with the reserve; also those at low effort, which need a
        little less memory.
      estimates: estimates of plans, with their memory.
      device_memory: memory of one device.
      least: for each mapping and knobs, the smallest expected ratio of needed to estimated memory;
        the key None stands for all others; empty while too little is known.
      typical: for each mapping and knobs, the geometric mean of the ratios of needed to estimated
        memory; empty before the first compile.
      seen: mappings and knobs for which the compiler has stated the memory of a plan.
    """

    outcomes: Mapping[Plan, Outcome]
    estimates: Mapping[Plan, Estimated]
    device_memory: DeviceMemory
    least: Mapping[Call | None, float]
    seen: frozenset[Call]
    typical: Mapping[Call, float] = field(default_factory=dict[Call, float])

    @staticmethod
    def of(
        outcomes: Mapping[Plan, Outcome],
        estimates: Mapping[Plan, Estimated],
        device_memory: DeviceMemory,
    ) -> MemoryBelief:
        """Compares estimates with the compiler's figures.

        The logarithms of the ratios are assumed to be normal for the same knobs, with one variance
        for all knobs; `least` is the prediction limit of Student's t for the next ratio.
        """
        ratios: dict[Call, list[float]] = {}
        for plan, outcome in outcomes.items():
            needed, estimated = _needed_bytes(outcome, device_memory), estimates.get(plan)
            if needed and estimated is not None and estimated.memory_bytes:
                ratios.setdefault(plan.call, []).append(math.log(needed / estimated.memory_bytes))
        return MemoryBelief(
            outcomes=outcomes,
            estimates=estimates,
            device_memory=device_memory,
            least=_least(ratios),
            seen=frozenset(ratios),
            typical={call: math.exp(sum(seen) / len(seen)) for call, seen in ratios.items()},
        )

    def expected_bytes(self, plan: Plan) -> float:
        """Returns the estimate of a plan's memory, corrected by the compiles of this search."""
        estimated = self.estimates.get(plan)
        if estimated is None:
            return 0.0
        # The default: no plan with these knobs may have been compiled, and other knobs have other
        # ratios.
        return estimated.memory_bytes * self.typical.get(plan.call, 1.0)

    def is_too_large(self, plan: Plan) -> bool:
        """Whether a plan is expected not to fit, so that a compile is not worth its time."""
        estimated, free_bytes = self.estimates.get(plan), self.device_memory.free_bytes
        ratio = self.least.get(plan.call, self.least.get(None))
        if estimated is None or ratio is None or not free_bytes:
            return False
        if isinstance(self.outcomes.get(plan), Compiled):
            return False
        return ratio * estimated.memory_bytes > free_bytes

    def seems_large(self, plan: Plan) -> bool:
        """Whether the estimate of a plan exceeds the memory of a device."""
        estimated = self.estimates.get(plan)
        if estimated is not None and estimated.memory_interval and not estimated.memory_interval[1]:
            return False  # A part of it has an unknown size.
        return 0 < self.device_memory.free_bytes < self.expected_bytes(plan) / _TOO_LARGE

    def may_fit(self, order: Sequence[Plan]) -> tuple[Plan, ...]:
        """Returns the plans of an order that are not expected to be too large."""
        return tuple(plan for plan in order if not self.is_too_large(plan))

    def worth_asking(self, order: Sequence[Plan]) -> tuple[Plan, ...]:
        """Returns the plans that may be compiled now, and those that were.

        If no plan with the same knobs was compiled and all seem too large, the smallest one is
        compiled first: its figure shows whether the others may fit.

        Args:
          order: best first.
        """
        scouts: dict[Call, Plan] = {}
        for plan in order:
            is_open = plan.call not in self.seen and plan not in self.outcomes
            if is_open and self.seems_large(plan):
                first = scouts.setdefault(plan.call, plan)
                if self.estimates[plan].memory_bytes < self.estimates[first].memory_bytes:
                    scouts[plan.call] = plan

        def is_worth(plan: Plan) -> bool:
            if plan in self.outcomes:
                return True
            waits = plan.call in scouts and plan != scouts[plan.call] and self.seems_large(plan)
            return not waits and not self.is_too_large(plan)

        return tuple(plan for plan in order if is_worth(plan))


def large_last(
    order: Sequence[Plan],
    estimates: Mapping[Plan, Estimated],
    device_memory: DeviceMemory,
    known: Mapping[Plan, Outcome] | None = None,
) -> tuple[Plan, ...]:
    """Moves plans whose estimate exceeds the device's memory to the end of an order.

    They are not excluded: if time is left, a compile may show that they fit.

    Args:
      known: compiled outcomes so far, which correct the estimates.
    """
    belief = MemoryBelief.of(known or {}, estimates, device_memory)
    return tuple(sorted(order, key=belief.seems_large))


def too_large_notice(number: int) -> str:
    """Returns the notice of a result about plans that were left out."""
    what = count(number, "plan that is", "plans that are")
    return f"left out {what} not expected to fit a device"


def _least(ratios: Mapping[Call, Sequence[float]]) -> dict[Call | None, float]:
    """See `MemoryBelief.least`.

    Args:
      ratios: logarithms, by mapping and knobs.
    """
    everything = [one for seen in ratios.values() for one in seen]
    least: dict[Call | None, float] = {}
    if len(everything) >= _ENOUGH:
        least[None] = _SPREAD * math.exp(min(everything))
    means = {call: sum(seen) / len(seen) for call, seen in ratios.items()}
    freedom = len(everything) - len(means)
    if freedom < _LEAST_FREEDOM:
        return least
    squares = sum((one - means[call]) ** 2 for call, seen in ratios.items() for one in seen)
    scatter = max(math.sqrt(squares / freedom), _SCATTER)
    limit = t_limit(_MISSED, freedom)
    for call, seen in ratios.items():
        least[call] = math.exp(means[call] - limit * scatter * math.sqrt(1 + 1 / len(seen)))
    return least


def _needed_bytes(outcome: Outcome, device_memory: DeviceMemory) -> float:
    """Returns the memory that the compiler needed on the device; 0 if unknown."""
    match outcome:
        case Compiled(memory=memory):
            return memory.peak_bytes
        case OutOfMemory(needed_bytes=needed) if device_memory.is_device(outcome):
            return needed
        case _:
            return 0
