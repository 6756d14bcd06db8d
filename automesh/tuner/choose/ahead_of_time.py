"""Which plans are worth a compile for devices that are not here (pure functions)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from automesh.cost.correction import Subject, refine
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, Estimated, Failure, Outcome, OutOfMemory
from automesh.report.words import count
from automesh.tuner.choose.beliefs import View
from automesh.tuner.choose.certificate import MARGIN, MAY_WIN, Chance, chances_of
from automesh.tuner.compile.memory_limit import Room

# At low effort the compiler's memory was 10 to 27 % below that at default effort: a program below
# this part of the limit counts as one that fits, until default effort says otherwise.
SURELY = 0.75
_BEHIND = 3


def interleaved(order: Sequence[Plan]) -> tuple[Plan, ...]:
    """An order in which compiler options, which estimates hardly know, do not crowd out the meshes.

    Every further choice of options stands `_BEHIND` places behind where its estimate puts it: after
    a few meshes at the first choice come the best of them with others.

    Args:
      order: best first; of plans that differ in options alone the usual one first.
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


def surely_fits(outcome: Outcome | None, room: Room) -> bool:
    """Whether a compile at low effort says clearly enough that a plan fits."""
    if not isinstance(outcome, Compiled):
        return False
    peak = outcome.memory.peak_bytes
    return not room.limit_bytes or peak <= min(SURELY * room.limit_bytes, room.free_bytes)


def to_screen(
    order: Sequence[Plan], known: Mapping[Plan, Outcome], room: Room, *, wanted: int
) -> tuple[Plan, ...]:
    """What to compile at low effort: the first plans, until enough of them fit.

    Args:
      order: best first.
      known: outcomes at low effort, or at default effort, so far.
      wanted: programs that fit; of plans that are not known it is hoped that they do.
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
        elif isinstance(outcome, Compiled) and surely_fits(outcome, room):
            programs.add(outcome.fingerprint)
    return tuple(chosen)


def to_compile(
    order: Sequence[Plan],
    screened: Mapping[Plan, Outcome],
    compiled: Mapping[Plan, Outcome],
    *,
    wanted: int,
) -> tuple[Plan, ...]:
    """What to compile at default effort: the first that low effort did not reject.

    Those that it did not see, where the time did not suffice, come last.

    Args:
      order: best first.
      wanted: programs that compile and fit.
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


def view_by_replay(estimates: Mapping[Plan, Estimated], compiled: Mapping[Plan, Outcome]) -> View:
    """The estimates of all plans, corrected by the replays of those that were compiled."""
    rows = {plan: row for row, plan in enumerate(estimates)}
    if not rows:
        return View(rows={}, refinement=None)
    subjects = [
        Subject(
            predicted_s=one.step_s,
            causes=one.causes,
            settings=plan.settings,
        )
        for plan, one in estimates.items()
    ]
    return View(rows=rows, refinement=refine(subjects, _replayed_s(rows, compiled)))


def _replayed_s(rows: Mapping[Plan, int], compiled: Mapping[Plan, Outcome]) -> dict[int, float]:
    """Seconds by row; a program that several plans have counts once."""
    seen: set[str] = set()
    times: dict[int, float] = {}
    for plan, outcome in compiled.items():
        if plan not in rows or not isinstance(outcome, Compiled) or outcome.fingerprint in seen:
            continue
        seen.add(outcome.fingerprint)
        times[rows[plan]] = outcome.step_s
    return times


def chances_left(
    plans: Sequence[Plan],
    screened: Mapping[Plan, Outcome],
    compiled: Mapping[Plan, Outcome],
    view: View,
) -> tuple[Chance, ...]:
    """How likely each plan that is left beats the best replay, the likeliest first."""
    times = [one.step_s for one in compiled.values() if isinstance(one, Compiled)]
    if not times or view.refinement is None:
        return ()
    return chances_of(left_of(plans, screened, compiled), view.rows, view.refinement, min(times))


def left_of(
    plans: Sequence[Plan], screened: Mapping[Plan, Outcome], compiled: Mapping[Plan, Outcome]
) -> tuple[Plan, ...]:
    """Plans that neither compiled at default effort, as themselves or as the same program, nor
    failed."""
    programs = {one.fingerprint for one in compiled.values() if isinstance(one, Compiled)}

    def is_open(plan: Plan) -> bool:
        seen = screened.get(plan)
        if plan in compiled or isinstance(seen, Failure):
            return False
        return not isinstance(seen, Compiled) or seen.fingerprint not in programs

    return tuple(plan for plan in plans if is_open(plan))


def challengers(chances: Sequence[Chance], view: View) -> tuple[Plan, ...]:
    """The plans that may still win; none as long as the model cannot tell its own error."""
    if view.refinement is None or view.refinement.loo_error is None:
        return ()
    return tuple(one.plan for one in chances if one.chance >= MAY_WIN)


def pairs_in_order(
    estimates: Mapping[Plan, Estimated], compiled: Mapping[Plan, Outcome]
) -> tuple[int, int]:
    """Pairs of compiled plans that the estimate orders as the replay does, and all pairs.

    Pairs whose replays are closer than `MARGIN` are ties, which no order can be wrong about.
    """
    plans = list(estimates)
    rows = {plan: row for row, plan in enumerate(plans)}
    times = [(estimates[plans[row]].step_s, s) for row, s in _replayed_s(rows, compiled).items()]
    right = total = 0
    for place, (first_s, first_replayed_s) in enumerate(times):
        for second_s, second_replayed_s in times[place + 1 :]:
            if abs(first_replayed_s - second_replayed_s) <= MARGIN * first_replayed_s:
                continue
            total += 1
            right += (first_s < second_s) == (first_replayed_s < second_replayed_s)
    return right, total


# Which plans are not expected to fit absent devices, by estimate and compiler (pure functions).

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
