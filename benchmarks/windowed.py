"""Does the windowed-einsum option of the TPU's compiler change the best plan, and by how much?

    python -m benchmarks.windowed [--shape base]... [--limit 6] [--replay]

For three shapes of the dense example, every (dp, fsdp, tp) mesh of `v5e:4x4` with the compiler's
own choice, and again with windowed einsums turned off wherever the terms of the step say that it
has any: compiled at default effort without a TPU, and replayed. A windowed einsum's permutes go to
the neighbours in both directions of a ring, so the replay books each on the links between the
coordinates of its two devices, in its direction. Prints the best plan without and with the option,
what the estimate says of both, and the reason in the words of `automesh explain`.

The last line on stdout is JSON: per shape
`changes_best, gain, best, best_at_default, largest_change`, where `gain` is how much shorter the
best step becomes and `largest_change` the largest effect on one mesh; progress goes to stderr.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from automesh.cost.windowed import THRESHOLDS
from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated
from automesh.report.comparison import Comparison
from automesh.report.explain.nouns import Explained, Explanation
from automesh.report.explain.words import verdict_sentence, window_sentence
from automesh.report.result import Candidate
from automesh.tuner.estimate.terms_cache import TermsCache
from automesh.tuner.explain.mesh import Ground, explained
from automesh.units import format_percent
from benchmarks.support.compiles import Bench, Case, Played, bench
from benchmarks.support.spaces import with_usual_axes

SHAPES = ("base", "wide", "narrow")
_OFF = 1_000_000
_UNKNOWN = Comparison(verdict="not_measured")
_SPACE = with_usual_axes(f"""
[axes]
dp = {{}}
fsdp = {{}}
tp = {{}}

[compiler_options.tpu]
{THRESHOLDS["tpu"]} = ["default", {_OFF}]
""")


def case_of(shape: str) -> Case:
    """The meshes of one shape, with and without the option, gathers left to the compiler: where the
    step gathers its weights itself there is nothing to multiply piece by piece."""
    return Case(
        name=f"windowed-{shape}",
        script="benchmarks/support/scripts/dense_shapes.py",
        argv=("--size", shape, "--gather", "compiler"),
        target="v5e:4x4",
        space=_SPACE,
    )


def usual(plan: Plan) -> Plan:
    """The plan with every option left to the compiler."""
    return replace(plan, compiler_options=())


def worth_compiling(estimates: dict[Plan, Estimated]) -> list[Plan]:
    """Plans at the default, and those whose estimate the option changes, fastest first."""
    kept = [
        plan
        for plan in estimates
        if plan == usual(plan) or estimates[plan].step_s != estimates[usual(plan)].step_s
    ]
    return sorted(kept, key=lambda plan: estimates[plan].step_s)


def figures(played: Sequence[Played]) -> dict[str, Any]:
    """What the option does; of meshes where it does nothing, the default stands for both."""
    times = {one.plan: one.replay.step_s for one in played if one.replay}
    default = {plan: step_s for plan, step_s in times.items() if plan == usual(plan)}
    if not default:
        return {"plans": len(times)}
    best, before = (min(known, key=lambda plan: known[plan]) for known in (times, default))
    changes = {
        plan: times[plan] / times[usual(plan)] - 1.0
        for plan in times
        if plan != usual(plan) and usual(plan) in times
    }
    largest = max(changes, key=lambda plan: abs(changes[plan]), default=None)
    return {
        "changes_best": best != before,
        "gain": round(1.0 - times[best] / times[before], 4),
        "best": str(best),
        "best_at_default": str(before),
        "largest_change": round(changes[largest], 4) if largest else 0.0,
        "largest_change_on": largest.mesh if largest else "",
        "plans": len(times),
    }


def reasons(one: Bench, first: Plan, second: Plan) -> list[str]:
    """Why one of two plans is faster, in the words of `automesh explain FIRST --against SECOND`."""
    preparation, player = one.preparation, one.player
    kept = TermsCache(
        folder=one.folder / "terms" / one.case.slug,
        source_hash=preparation.inspection.source_hash,
        versions=preparation.provenance,
    ).all()
    ground = Ground(kept=kept, hardware=player.hardware, command="")

    def side(plan: Plan) -> Explained:
        outcome = one.outcome(plan)
        assert outcome is not None
        return explained(plan, ground, Candidate(plan=plan, outcome=outcome, standing=_UNKNOWN))

    explanation = Explanation(
        workload=one.case.name,
        target=one.case.target,
        device=player.hardware.fabric.chip.name,
        device_count=first.num_devices,
        speeds=player.hardware.speeds.origin,
        one=side(first),
        against=side(second),
    )
    return [verdict_sentence(explanation), window_sentence(explanation)]


def _table(played: Sequence[Played]) -> list[str]:
    lines = [f"{'mesh':<22}{'windowed einsums':<18}{'replay':>9}{'estimate':>10}   ms"]
    for one in sorted(played, key=lambda one: (one.plan.mesh, len(one.plan.compiler_options))):
        option = "off" if one.plan.compiler_options else "as compiled"
        replay = f"{one.replay.step_s * 1e3:9.2f}" if one.replay else one.failure
        lines.append(f"{one.plan.mesh:<22}{option:<18}{replay}{one.estimated.step_s * 1e3:10.2f}")
    return lines


def _compared(one: Bench, found: dict[str, Any], played: Sequence[Played]) -> list[str]:
    plans = {str(each.plan): each.plan for each in played}
    lines = [
        f"best: {found['best']}; at the default: {found['best_at_default']}; "
        f"{format_percent(found['gain'])} gained"
    ]
    if found["changes_best"]:
        best, before = plans[found["best"]], plans[found["best_at_default"]]
        lines += reasons(one, best, before)
    off = next((plan for plan in plans.values() if plan.compiler_options), None)
    if off is None:
        lines.append("by its terms no mesh of this step has a windowed einsum: nothing to turn off")
    largest = [plan for plan in plans.values() if plan.mesh == found["largest_change_on"]]
    if off is not None and len(largest) == 2:
        lines += reasons(one, largest[0], largest[1])
    return lines


def main(
    shape: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Compile only the so many best by estimate; 0: all.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Compiles side by side.")] = 2,
    folder: Annotated[Path, typer.Option(help="For records.")] = Path("results/windowed"),
    replay: Annotated[bool, typer.Option("--replay", help="Compile nothing more.")] = False,
) -> None:
    """Compiles, replays, and prints what the option does to the best plan."""
    summary: dict[str, dict[str, Any]] = {}
    for name in shape or SHAPES:
        with bench(case_of(name), folder.absolute(), lambda legal: legal) as one:
            plans = worth_compiling(dict(one.estimates))
            if not replay:
                one.compile(plans[:limit] if limit else plans, workers=workers)
            played = one.played(plans)
            found = figures(played)
            print(f"{name} on {one.case.target}")
            for line in (*_table(played), *(_compared(one, found, played) if played else ())):
                print(line)
            summary[name] = found
    print(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
