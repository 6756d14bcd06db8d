"""Which plans are expected to fit devices that are not here, by estimate and compiler.

Pure functions. An estimate of memory is off by a factor that plans with the same knobs share: of an
8B model on TPU v5p the compiler needed 0.68 to 0.71 times the estimate with `remat=full`, 0.77 to
0.79 times with two microbatches of it, and 0.87 to 0.92 times with two of `remat=dots`, whatever
the mesh. So a few answers of the compiler correct the estimates of their neighbours. That decides
what is worth a compile; it is never a verdict, and a result says how many plans were left out.
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

# An estimate of memory is seldom this far above what the compiler then needs.
_TOO_LARGE = 1.15
# Where nothing with the same knobs was compiled, the next plan may have a smaller ratio yet: of two
# models on v5e and v5p, 394 plans in all, the compiler needed 0.69 to 1.75 times the estimate.
_SPREAD = 0.75
_ENOUGH = 5
# Of plans with the same knobs: the chance that one is left out which would fit.
_MISSED = 0.01
# The least standard deviation that the logarithms of their ratios are taken to have.
_SCATTER = 0.03
# The least degrees of freedom of that deviation, below which nothing is concluded from it.
_LEAST_FREEDOM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBelief:
    """What compiles have shown of estimates of memory, in one search.

    Attributes:
      outcomes: what the compiler said, with the reserve, at low effort too: it then needs a little
        less.
      estimates: of memory, among others.
      device_memory: what there is.
      least: per mapping and knobs, the least part of its estimate that a plan is believed to need;
        None: of all others; empty while too little is known.
      typical: per mapping and knobs the part of its estimate that a plan has needed so far, in the
        geometric mean; empty before the first compile.
      seen: mappings and knobs of which the compiler has stated the memory of a plan.
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
        """Compares estimates with what the compiler said.

        With the same knobs the logarithms of the ratios are taken to be normal, with one variance
        for all knobs; the limit is that of a next one by Student's t.
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
        """The estimate of a plan's memory, corrected by what compiles of this search have shown."""
        estimated = self.estimates.get(plan)
        if estimated is None:
            return 0.0
        # Other knobs have other ratios: of plans with these none may have been compiled.
        return estimated.memory_bytes * self.typical.get(plan.call, 1.0)

    def is_hopeless(self, plan: Plan) -> bool:
        """Whether a plan is believed not to fit, so that no compiler need be asked."""
        estimated, free_bytes = self.estimates.get(plan), self.device_memory.free_bytes
        ratio = self.least.get(plan.call, self.least.get(None))
        if estimated is None or ratio is None or not free_bytes:
            return False
        if isinstance(self.outcomes.get(plan), Compiled):
            return False
        return ratio * estimated.memory_bytes > free_bytes

    def is_large(self, plan: Plan) -> bool:
        """Whether a plan is estimated to need more memory than there is."""
        estimated = self.estimates.get(plan)
        if estimated is not None and estimated.memory_interval and not estimated.memory_interval[1]:
            return False  # Something in it has a size that nobody knows.
        return 0 < self.device_memory.free_bytes < self.expected_bytes(plan) / _TOO_LARGE

    def may_fit(self, order: Sequence[Plan]) -> tuple[Plan, ...]:
        """The plans of an order that are not believed to be too large."""
        return tuple(plan for plan in order if not self.is_hopeless(plan))

    def worth_asking(self, order: Sequence[Plan]) -> tuple[Plan, ...]:
        """What the compiler may be asked now, and what it has answered.

        Of plans that seem too large, and none with whose knobs was compiled, the smallest one goes
        ahead: what the compiler needs for it says whether the others have a chance.

        Args:
          order: best first.
        """
        scouts: dict[Call, Plan] = {}
        for plan in order:
            is_open = plan.call not in self.seen and plan not in self.outcomes
            if is_open and self.is_large(plan):
                first = scouts.setdefault(plan.call, plan)
                if self.estimates[plan].memory_bytes < self.estimates[first].memory_bytes:
                    scouts[plan.call] = plan

        def is_worth(plan: Plan) -> bool:
            if plan in self.outcomes:
                return True
            waits = plan.call in scouts and plan != scouts[plan.call] and self.is_large(plan)
            return not waits and not self.is_hopeless(plan)

        return tuple(plan for plan in order if is_worth(plan))


def large_last(
    order: Sequence[Plan],
    estimates: Mapping[Plan, Estimated],
    device_memory: DeviceMemory,
    known: Mapping[Plan, Outcome] | None = None,
) -> tuple[Plan, ...]:
    """The order with plans behind that are estimated to need more memory than there is.

    They are not ruled out: what is left of the time may show that they fit.

    Args:
      known: what the compiler has said so far: it corrects the estimates.
    """
    belief = MemoryBelief.of(known or {}, estimates, device_memory)
    return tuple(sorted(order, key=belief.is_large))


def too_large_notice(number: int) -> str:
    """What a result says of plans that were left out."""
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
    """What the compiler needed on the device; 0 if it did not say."""
    match outcome:
        case Compiled(memory=memory):
            return memory.peak_bytes
        case OutOfMemory(needed_bytes=needed) if device_memory.is_device(outcome):
            return needed
        case _:
            return 0
