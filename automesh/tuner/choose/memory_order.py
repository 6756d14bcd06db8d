"""Which plans are not expected to fit absent devices, by estimate and compiler (pure functions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Outcome, OutOfMemory
from automesh.report.words import count
from automesh.tuner.compile.memory_limit import Room

# An estimate of memory is seldom this far above what the compiler then needs.
_TOO_LARGE = 1.15
# A margin, for the next plan may have a smaller ratio yet: of two models on v5e and v5p, 394 plans
# in all, the compiler needed 0.69 to 1.75 times the estimate.
_SPREAD = 0.75
_ENOUGH = 5


def large_last(
    order: Sequence[Plan], estimates: Mapping[Plan, Estimated], room: Room
) -> tuple[Plan, ...]:
    """The order with plans behind that are estimated to need more memory than there is.

    They are not ruled out: what is left of the time may show that they fit.
    """

    def is_large(plan: Plan) -> bool:
        estimated = estimates.get(plan)
        least = 0 if estimated is None else estimated.memory_bytes / _TOO_LARGE
        return 0 < room.free_bytes < least

    return tuple(sorted(order, key=is_large))


def hopeless(
    plans: Sequence[Plan],
    outcomes: Mapping[Plan, Outcome],
    estimates: Mapping[Plan, Estimated],
    room: Room,
) -> frozenset[Plan]:
    """The plans that are believed not to fit, for which no compiler need be asked.

    The estimate of a plan is scaled by the smallest ratio of what the compiler needed to what was
    estimated: of plans with the same knobs if there are enough, else of all; and by a margin.

    Args:
      plans: of which.
      outcomes: what the compiler said, at low effort too: it then needs a little less.
      estimates: of memory, among others.
    """
    ratios: dict[object, list[float]] = {}
    for plan, outcome in outcomes.items():
        needed, estimated = _needed_bytes(outcome, room), estimates.get(plan)
        if needed and estimated is not None and estimated.memory_bytes:
            ratio = needed / estimated.memory_bytes
            for group in (plan.call, None):
                ratios.setdefault(group, []).append(ratio)
    least = {group: min(seen) for group, seen in ratios.items() if len(seen) >= _ENOUGH}
    if None not in least or not room.free_bytes:
        return frozenset()

    def is_hopeless(plan: Plan) -> bool:
        estimated = estimates.get(plan)
        if estimated is None:
            return False
        ratio = _SPREAD * least.get(plan.call, least[None])
        return ratio * estimated.memory_bytes > room.free_bytes

    return frozenset(plan for plan in plans if is_hopeless(plan))


def said_of_hopeless(number: int) -> str:
    """What a result says of plans that were left out."""
    what = count(number, "mesh, whose estimate is", "meshes, whose estimates are")
    return f"left out {what} far above the memory of a device"


def _needed_bytes(outcome: Outcome, room: Room) -> float:
    """What the compiler needed on the device; 0 if it did not say."""
    match outcome:
        case Compiled(memory=memory):
            return memory.peak_bytes
        case OutOfMemory(needed_bytes=needed) if room.is_device(outcome):
            return needed
        case _:
            return 0
