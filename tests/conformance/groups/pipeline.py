"""Conformance cases about schedules of pipelines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from automesh.pipeline import (
    SCHEDULES,
    Schedule,
    StageCost,
    make_schedule,
    parse_schedule,
    simulate,
)
from automesh.pipeline.catalogue import wavefront_order
from tests.conformance.outcomes import (
    Case,
    Departure,
    Verdict,
    Wanted,
    attempt,
    fits,
    judge,
)
from tests.support.samples.schedule_closed_forms import promised_held, promised_makespan

_NAMES = {
    "jaxpp.GPipe": "gpipe",
    "jaxpp.Std1F1B": "1f1b",
    "jaxpp.Eager1F1B": "eager_1f1b",
    "jaxpp.ZeroBubble": "zb_h1",
    "jaxpp.Interleaved1F1B": "interleaved",
    "jaxpp.KimiK2": "kimi_k2",
    "jaxpp.DualPipeV": "dualpipe_v",
    "spectrax.GPipe": "gpipe",
    "spectrax.Std1F1B": "1f1b",
    "spectrax.Eager1F1B": "eager_1f1b",
    "spectrax.ZeroBubbleH1": "zb_h1",
    "spectrax.InterleavedH1(interleaved)": "interleaved",
    "spectrax.InterleavedH1(loop)": "interleaved",
    "spectrax.DualPipeV": "dualpipe_v",
}
# Of the others, automesh makes the order to the letter.
_OWN_ORDER = {
    "jaxpp.DualPipeV": "dualpipe-v-keeps-backwards-whole",
    "spectrax.GPipe": "schedules-hold-what-they-promise",
    "spectrax.Std1F1B": "schedules-hold-what-they-promise",
    "spectrax.Eager1F1B": "schedules-hold-what-they-promise",
    "spectrax.ZeroBubbleH1": "schedules-hold-what-they-promise",
    "spectrax.InterleavedH1(interleaved)": "schedules-hold-what-they-promise",
    "spectrax.InterleavedH1(loop)": "stages-are-dealt-round",
    "spectrax.DualPipeV": "dualpipe-v-keeps-backwards-whole",
}
_SEVERAL = ("interleaved", "kimi_k2", "wavefront")
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "AnySchedule": SCHEDULES,
    "AnyInterleaved": _SEVERAL,
    "AnyNonInterleaved": tuple(name for name in SCHEDULES if name != "dualpipe_v"),
    "Interleaved1F1B": ("interleaved",),
    "DualPipeV": ("dualpipe_v",),
}
_CALL = re.compile(r"(?:len\()?(\w+)\(([^()]*)\)(?:\.tasks\((\w+)\)\)?)?")


def run_schedule(case: Case, about: Case) -> Verdict:
    """The original's order simulates as stated, and automesh's is the same or as promised.

    An order that automesh does not make passes if it simulates as stated; where the case has none,
    automesh's own schedule of that name is judged.
    """
    name, virtual = case["schedule"], case.get("virtual", 1)

    def make() -> Schedule:
        return make_schedule(
            _NAMES[name],
            num_ranks=case["stages"],
            num_microbatches=case["microbatches"],
            num_stages=case["stages"] * virtual,
        )

    if "raises" in case:
        return judge([Wanted(raises=case["raises"])], attempt(make))
    stated = case["simulated"] if virtual == 1 else case["simulated_half_cost_chunks"]
    cost = StageCost(
        forward_s=1 / virtual,
        backward_s=2 / virtual,
        input_gradient_s=1 / virtual,
        weight_gradient_s=1 / virtual,
    )
    lines = case["order"]
    if lines is not None:
        replayed = attempt(lambda: _simulated(parse_schedule(lines), cost))
        if not fits(Wanted(returns=stated), replayed):
            return Verdict(status="failed", detail=f"of the original order: {replayed}")
    if name not in _OWN_ORDER:
        wanted = {"order": lines, "simulated": stated}
        return judge([Wanted(returns=wanted)], attempt(lambda: _described(make(), cost, lines)))
    if lines is not None:
        return Verdict(status="passed")
    promised = Wanted(
        returns=_promised(_NAMES[name], case["stages"], case["microbatches"], virtual)
    )
    got = attempt(lambda: _simulated(make(), cost))
    departure = Departure(name=_OWN_ORDER[name], wanted=promised)
    return judge([Wanted(returns=stated)], got, departure)


def _promised(name: str, ranks: int, microbatches: int, virtual: int) -> dict[str, object]:
    makespan = promised_makespan(name, ranks, microbatches, virtual)
    return {
        "valid": True,
        "makespan": makespan,
        "bubble_fraction": round(1 - 3 * microbatches / makespan, 4),
        "peak_live_per_rank": promised_held(name, ranks, microbatches, virtual),
    }


def _simulated(schedule: Schedule, cost: StageCost) -> dict[str, object]:
    simulated = simulate(schedule, cost)
    return {
        "valid": True,
        "makespan": simulated.makespan_s,
        "bubble_fraction": round(simulated.bubble, 4),
        "peak_live_per_rank": list(simulated.peak_live),
    }


def _described(schedule: Schedule, cost: StageCost, lines: object) -> dict[str, object]:
    # Where the case has no order, there is none to compare with.
    order = None if lines is None else _spelled(schedule)
    return {"order": order, "simulated": _simulated(schedule, cost)}


def _spelled(schedule: Schedule) -> list[str]:
    """A line per rank, with stages named on all of a schedule with several per rank."""
    if schedule.num_stages == schedule.num_ranks:
        return str(schedule).splitlines()
    return [" ".join(map(str, actions)) for actions in schedule.ranks]


def run_wavefront(case: Case, about: Case) -> Verdict:
    """One order for all ranks, each rank's part of it, and what it simulates as."""

    def make() -> dict[str, object]:
        groups, microbatches, layers = case["groups"], case["microbatches"], case["layers"]
        schedule = make_schedule(
            "wavefront", num_ranks=groups, num_microbatches=microbatches, num_stages=layers
        )
        return {
            "global_order": list(map(str, wavefront_order(groups, microbatches, layers))),
            "per_rank": str(schedule).splitlines(),
            "simulated": _simulated(schedule, StageCost()),
        }

    wanted = {name: case[name] for name in ("global_order", "per_rank", "simulated")}
    return judge([Wanted(returns=wanted)], attempt(make))


def run_error(case: Case, about: Case) -> Verdict:
    """A call of JaxPP's, of every schedule of automesh's that it stands for."""
    match = _CALL.fullmatch(case["call"])
    if match is None:
        return Verdict(status="failed", detail=f"`{case['call']}` cannot be read")
    stages_of = dict(re.findall(r"(\w+)=(-?\d+)", match[2]))
    microbatches = int(match[3]) if match[3] and match[3].isdecimal() else 16
    stages = int(stages_of["num_stages"])
    ranks = int(stages_of.get("mpmd_dim", stages))

    def call(name: str) -> Callable[[], int]:
        return lambda: len(
            make_schedule(
                name, num_ranks=ranks, num_microbatches=microbatches, num_stages=stages
            ).ranks
        )

    expect = case["expect"]
    original = Wanted(raises=expect.get("raises", ""), returns=expect.get("returns"))
    verdicts = [judge([original], attempt(call(name))) for name in _FAMILIES[match[1]]]
    return next((one for one in verdicts if one.status != "passed"), verdicts[0])


GROUPS: Mapping[str, Callable[[Case, Case], Verdict]] = {
    "pipeline_schedules": run_schedule,
    "multimesh_wavefront": run_wavefront,
    "jaxpp_schedule_errors": run_error,
}
