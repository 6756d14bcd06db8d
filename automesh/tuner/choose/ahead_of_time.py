"""Chooses plans that are worth a compile for absent devices (pure functions)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Failure, Outcome
from automesh.tuner.choose.beliefs import known_s
from automesh.tuner.choose.certificate import MARGIN, MAY_WIN
from automesh.tuner.choose.state import SearchState
from automesh.tuner.compile.memory_limit import DeviceMemory

# At low effort the compiler needed 10 to 27 % less memory than at default effort. So a program
# below this part of the limit counts as one that fits, until default effort shows otherwise.
SURELY = 0.75
_BEHIND = 3


def interleaved(order: Sequence[Plan]) -> tuple[Plan, ...]:
    """Reorders plans so that many choices of compiler options do not displace other meshes.

    Estimates hardly see compiler options. So each further choice of options of a mesh is moved
    `_BEHIND` places back: first come a few meshes with the first choice, then the best of them with
    others.

    Args:
      order: best first; among plans that differ only in options, the usual one first.
    """
    places: dict[tuple[object, object], int] = {}
    choices: Counter[tuple[object, object]] = Counter()
    keys: dict[Plan, int] = {}
    for plan in order:
        base = (plan.axes, plan.call)
        place = places.setdefault(base, len(places))
        keys[plan] = place + _BEHIND * choices[base]
        choices[base] += 1
    return tuple(sorted(order, key=lambda plan: keys[plan]))


def surely_fits(outcome: Outcome | None, device_memory: DeviceMemory) -> bool:
    """Whether a compile at low effort shows with a safe margin that a plan fits."""
    if not isinstance(outcome, Compiled):
        return False
    peak = outcome.memory.peak_bytes
    return not device_memory.limit_bytes or peak <= min(
        SURELY * device_memory.limit_bytes, device_memory.free_bytes
    )


def to_screen(
    order: Sequence[Plan],
    known: Mapping[Plan, Outcome],
    device_memory: DeviceMemory,
    *,
    wanted: int,
) -> tuple[Plan, ...]:
    """Returns the plans to compile at low effort: the first ones, until enough of them fit.

    Args:
      order: best first.
      known: outcomes so far, at low or default effort.
      wanted: number of programs that fit; plans without an outcome are assumed to fit.
    """
    chosen: list[Plan] = []
    programs: set[str] = set()
    for plan in order:
        if len(programs) >= wanted:
            break
        chosen.append(plan)
        outcome = known.get(plan)
        if outcome is None:
            programs.add(str(plan))
        elif isinstance(outcome, Compiled) and surely_fits(outcome, device_memory):
            programs.add(outcome.fingerprint)
    return tuple(chosen)


def to_compile(
    order: Sequence[Plan],
    screened: Mapping[Plan, Outcome],
    compiled: Mapping[Plan, Outcome],
    *,
    wanted: int,
) -> tuple[Plan, ...]:
    """Returns the plans to compile at default effort: the first ones that low effort did not
    reject.

    Plans that were not compiled at low effort, for lack of time, come last.

    Args:
      order: best first.
      wanted: number of programs that compile and fit.
    """
    left = [plan for plan in order if not isinstance(screened.get(plan), Failure)]
    left.sort(key=lambda plan: plan not in screened and plan not in compiled)
    chosen: list[Plan] = []
    programs: set[str] = set()
    for plan in left:
        if len(programs) >= wanted:
            break
        chosen.append(plan)
        outcome = compiled.get(plan, screened.get(plan))
        if outcome is None:
            programs.add(str(plan))
        elif isinstance(outcome, Compiled):
            programs.add(outcome.fingerprint)
    return tuple(chosen)


def challengers(state: SearchState, among: Sequence[Plan]) -> tuple[Plan, ...]:
    """Returns the plans that may still win; none while the model cannot estimate its own error."""
    refinement = state.view().refinement
    if refinement is None or refinement.loo_error is None:
        return ()
    chances = state.chances(state.best_s(), among)
    return tuple(chance.plan for chance in chances if chance.chance >= MAY_WIN)


def pairs_in_order(
    estimates: Mapping[Plan, Estimated], compiled: Mapping[Plan, Outcome]
) -> tuple[int, int]:
    """Returns the number of pairs of compiled plans that estimate and replay order alike, and of
    all pairs.

    Pairs whose replays differ by less than `MARGIN` are ties and are not counted.
    """
    replayed = known_s({plan: compiled[plan] for plan in compiled if plan in estimates}).items()
    times = [(estimates[plan].step_s, seconds) for plan, seconds in replayed]
    right = total = 0
    for place, (first_s, first_replayed_s) in enumerate(times):
        for second_s, second_replayed_s in times[place + 1 :]:
            if abs(first_replayed_s - second_replayed_s) <= MARGIN * first_replayed_s:
                continue
            total += 1
            right += (first_s < second_s) == (first_replayed_s < second_replayed_s)
    return right, total
