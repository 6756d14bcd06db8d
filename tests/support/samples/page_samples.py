"""Pages of studies for the tests of the report: real ones as they were recorded, and made-up ones
that are larger, worse or more hostile than a small search is."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np

from automesh.cost.replay.replay import replay
from automesh.hardware import chip_for, parse_target
from automesh.hardware.calibration.datasheet import datasheet_speeds
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated, Failed, Measured, OutOfMemory, TimedOut
from automesh.pipeline import make_schedule, simulate
from automesh.report.comparison import Comparison, Verification
from automesh.report.explain.nouns import Explained
from automesh.report.explain.words import verdict_sentence
from automesh.report.html.nouns import (
    DrawnTimeline,
    EstimatedPlan,
    HeldActivations,
    MeasuredRound,
    MemoryPoint,
    StudyPage,
)
from automesh.report.result import Candidate
from automesh.tuner.choose.ranking import rank
from automesh.tuner.page.drawings import placed, wiring_of
from tests.regenerate import record_pages
from tests.regenerate.record_studies import FOLDER, read
from tests.support.cases.explain_golden import decoder
from tests.support.cases.replay_golden import ALL as MODULES
from tests.support.samples import explain_samples, results_samples
from tests.support.samples.changed_results import changed
from tests.support.samples.replay_samples import layouts_of

GIB = 2**30
EXAMPLES = ("dense_lm", "moe_lm", "long_context")
HOSTILE = (
    "</script><script>window.hacked = 1</script>"
    '<img src=x onerror="window.hacked = 1">&lt;b&gt;\'"`${window.hacked = 1}'
)


def recorded(name: str) -> StudyPage:
    """A search of an example as `tests/data/studies` holds it, as if its best plan was exported."""
    study = read(FOLDER / f"{name}.json")
    measured = dict(study.measured)
    fastest = sorted(
        (plan for plan, one in measured.items() if one.kind == "measured"),
        key=lambda plan: getattr(measured[plan], "step_s", 0.0),
    )
    best, own = measured[fastest[0]], measured[fastest[-1]]
    assert isinstance(best, Measured) and isinstance(own, Measured)
    measured[fastest[0]] = replace(best, confirmed=True)
    speedup = own.step_s / best.step_s
    confirmed = Verification(
        processes=4,
        baseline=str(fastest[-1]),
        gain=Comparison(verdict="slower", ratio=speedup, interval=(0.95 * speedup, 1.05 * speedup)),
    )
    ranked = rank(
        compiled=dict(study.compiled),
        measured=measured,
        comparisons=(),
        baseline=fastest[-1:],
        chip=chip_for(study.device_kind, study.platform),
        winner=fastest[:1],
        estimates=dict(study.estimates),
    )
    rounds = [
        MeasuredRound(number=number, where="race 1", plan=str(plan), step_s=seconds)
        for plan in fastest
        for number, seconds in enumerate(getattr(measured[plan], "rounds_s", ()), start=1)
    ]
    last = max((one.number for one in rounds), default=0)
    rounds += [
        MeasuredRound(
            number=last + number,
            where="fresh processes",
            plan=str(plan),
            step_s=measured[plan].step_s * (1 + 0.01 * number),  # pyright: ignore
        )
        for plan in fastest[:2]
        for number in (1, 2, 3)
    ]
    base = results_samples.measured_search()
    funnel = replace(base.funnel, compiled=len(study.compiled), measured=len(fastest))
    result = changed(
        base, workload=name, candidates=ranked, funnel=funnel, verifications=(confirmed,)
    )
    explained = tuple(
        explained_of(plan) for plan in ("dp:8,fsdp:2", "fsdp:4,tp:4", "fsdp:16", "tp:16")
    )
    return with_explained(StudyPage(result=result, rounds=tuple(rounds)), explained)


def explained_of(mesh: str) -> Explained:
    active = tuple(part.partition(":")[0] for part in mesh.split(","))
    return explain_samples.explained(mesh, decoder(*active))


def with_explained(page: StudyPage, explained: tuple[Explained, ...]) -> StudyPage:
    pairs = combinations(range(len(explained)), 2)
    points = (
        MemoryPoint(source="model.py:31", bytes=3 * GIB // 2),
        MemoryPoint(source="model.py:32", bytes=2 * GIB),
        MemoryPoint(source="model.py:40", bytes=GIB),
    )
    return replace(
        page,
        explained=explained,
        verdicts=tuple(
            (
                (first, second),
                verdict_sentence(explain_samples.explanation(explained[first], explained[second])),
            )
            for first, second in pairs
        ),
        points=(points,) * len(explained),
        wiring=wiring_of(explain_samples.fabric()),
        placements=placed(
            [one.plan for one in explained],
            explain_samples.fabric(),
            HardwareModel(
                fabric=explain_samples.fabric(),
                layouts=explain_samples.NO_LAYOUTS,
                speeds=explain_samples.PlainSpeeds(),
            ),
            {},
        ),
    )


def replayed() -> StudyPage:
    """Two TPU slices that are not here: the schedules of recorded programs, replayed."""
    names = ("tpu_dcn_dp", "tpu_dcn_fsdp")
    modules = [one for one in MODULES if one.name in names]
    timelines: list[DrawnTimeline] = []
    candidates: list[Candidate] = []
    placements = []
    for place, module in enumerate(modules):
        plan, fabric = Plan(axes=module.axes), module.fabric
        hardware = HardwareModel(
            fabric=fabric,
            layouts=layouts_of(fabric, module.axes),
            speeds=datasheet_speeds(fabric.chip, fabric),
        )
        found, timeline = replay(module.schedule(), axes=module.axes, hardware=hardware)
        timelines.append(DrawnTimeline(plan=plan, kind="replay", timeline=timeline))
        compiled = replace(
            results_samples.compiled(found.step_s, peak_bytes=(9 + 3 * place) * GIB),
            replay=found,
            stored="ab",
        )
        estimate = Estimated(
            step_s=0.9 * found.step_s,
            bracket_s=found.bracket_s,
            bound_s=0.0,
            memory_bytes=(8 + 3 * place) * GIB,
            causes=found.causes,
        )
        candidates.append(
            Candidate(
                plan=plan,
                outcome=compiled,
                standing=Comparison(
                    verdict="not_measured", ratio=found.step_s / timelines[0].timeline.step_s
                ),
                bound_by=found.causes[0][0],
                peak_bytes=(9 + 3 * place) * GIB,
                is_baseline=place == 1,
                estimated=estimate,
            )
        )
        placements += placed([plan], fabric, hardware, {})
    candidates.sort(key=lambda one: getattr(one.outcome, "step_s", 0.0))
    first_s = getattr(candidates[0].outcome, "step_s", 1.0)
    ranked = tuple(
        replace(
            one,
            standing=Comparison(
                verdict="not_measured" if place else "best",
                ratio=getattr(one.outcome, "step_s", 1.0) / first_s,
                interval=(getattr(one.outcome, "step_s", 1.0) / first_s,) * 2,
            ),
        )
        for place, one in enumerate(candidates)
    )
    refused = results_samples.candidate(
        results_samples.plan("dp:32"),
        OutOfMemory(
            stage="compile",
            needed_bytes=21 * GIB,
            limit_bytes=63 * GIB // 4,
            detail="",
            reserve_bytes=GIB // 4,
        ),
        "failed",
    )
    base = results_samples.predicted_search()
    absent = parse_target("v5e:4x4*2", {}).absent
    assert absent is not None
    result = changed(
        base,
        target="v5e-4x4-2",
        kind="TPU v5 lite",
        count=32,
        axes=("dp", "fsdp", "tp"),
        axis_types=("auto",) * 3,
        candidates=(*ranked, refused),
        memory_bytes=63 * GIB // 4,
    )
    return StudyPage(
        result=result,
        timelines=tuple(timelines),
        wiring=wiring_of(absent.fabric),
        placements=tuple(placements),
        left_out={"rounds": "these devices are not here, so nothing was raced"},
    )


def pipelined() -> StudyPage:
    """A pipeline of 4 ranks, simulated."""
    from automesh.cost.replay.timeline import Slice, Timeline

    simulated = simulate(make_schedule("1f1b", num_ranks=4, num_microbatches=8))
    scale = 1e-3
    slices = [
        Slice(
            kind="work",
            track=f"rank {rank}",
            name=str(span.action),
            start_s=scale * span.start_s,
            seconds=scale * (span.end_s - span.start_s),
            cause="compute" if str(span.action)[0] == "F" else "memory",
            source=f"microbatch {span.action.microbatch}",
        )
        for rank, spans in enumerate(simulated.spans)
        for span in spans
    ]
    slices += [
        Slice(
            kind="wait",
            track=f"rank {rank}",
            name="waits",
            start_s=0.0,
            seconds=scale * spans[0].start_s,
            cause="bubble",
        )
        for rank, spans in enumerate(simulated.spans)
        if spans[0].start_s
    ]
    plan = results_samples.plan("dp:2,tp:4", remat="dots")
    held = tuple(
        HeldActivations(rank=rank, at_s=scale * one.at_s, bytes=one.activations * GIB // 4)
        for rank, moments in enumerate(simulated.held)
        for one in moments
    )
    drawn = DrawnTimeline(
        plan=plan,
        kind="schedule",
        timeline=Timeline(step_s=scale * simulated.makespan_s, slices=tuple(slices)),
        held=held,
    )
    page = StudyPage(result=results_samples.measured_search(), timelines=(drawn,))
    return with_explained(page, tuple(map(explained_of, ("fsdp:4,tp:4", "fsdp:16"))))


def failed() -> StudyPage:
    """Nothing came of it."""
    base = results_samples.measured_search()
    outcomes = (
        Failed(stage="build", reason="ValueError: heads (6) must be a multiple of tp (4)"),
        TimedOut(stage="compile", limit_s=60.0),
        OutOfMemory(stage="run", needed_bytes=31 * GIB, limit_bytes=16 * GIB, detail=""),
    )
    candidates = tuple(
        results_samples.candidate(results_samples.plan(mesh, remat="none"), outcome, "failed")
        for mesh, outcome in zip(("dp:8", "tp:8", "dp:4,tp:2"), outcomes, strict=True)
    )
    funnel = replace(
        base.funnel,
        compiled=0,
        duplicates=0,
        measured=0,
        failed=1,
        out_of_memory=1,
        timed_out=1,
        waiting=117,
    )
    return StudyPage(
        result=changed(
            base, candidates=candidates, funnel=funnel, verifications=(), rules_path="", made=""
        ),
        left_out={
            "explained": "none of the best plans was estimated before time was up",
            "rounds": "no race was run yet",
            "timelines": "this search measured whole steps",
            "placements": "the study does not say how its devices are linked",
        },
    )


def large(count: int = 5000) -> StudyPage:
    """So many plans as one page must show, most of them mere estimates."""
    page = recorded("dense_lm")
    random = np.random.default_rng(0)
    sizes = (1, 2, 4, 8, 16)
    every = list(product(sizes, sizes, sizes, sizes, ("none", "dots", "full"), (1, 2, 4)))
    estimated = [
        EstimatedPlan(
            mesh=f"dp:{dp},fsdp:{fsdp},tp:{tp},sp:{sp}",
            settings=(("remat", remat), ("microbatches", str(split)), ("run", str(place))),
            step_s=float(seconds),
            bracket_s=(0.8 * float(seconds), 1.5 * float(seconds)),
            memory_bytes=int(size),
            causes=(("compute", 0.7 * float(seconds)), ("memory", 0.3 * float(seconds))),
        )
        for place, ((dp, fsdp, tp, sp, remat, split), seconds, size) in enumerate(
            zip(every, random.lognormal(-2, 0.6, len(every)), random.lognormal(17, 0.5, len(every)))
        )
    ]
    return replace(page, estimated=tuple(estimated[: count - len(page.result.candidates)]))


def hostile() -> StudyPage:
    """Texts that would do something if anything read them as HTML or JavaScript."""
    page = pipelined()
    result = changed(
        page.result,
        workload=HOSTILE,
        notices=(HOSTILE,),
        versions=(("automesh", "0.1.0"), (HOSTILE, HOSTILE)),
        candidates=tuple(
            replace(one, outcome=Failed(stage=HOSTILE, reason=HOSTILE))
            if isinstance(one.outcome, Failed)
            else replace(one, plan=replace(one.plan, knobs=(("remat", HOSTILE),)))
            for one in page.result.candidates
        ),
    )
    return replace(page, result=result, left_out={"rounds": HOSTILE})


REAL = tuple(record_pages.SEARCHES)
PAGES = {
    **{name: (lambda name=name: recorded(name)) for name in EXAMPLES},
    **{name: (lambda name=name: record_pages.read(name)) for name in REAL},
    "replayed": replayed,
    "pipelined": pipelined,
    "failed": failed,
    "large": large,
    "hostile": hostile,
}
