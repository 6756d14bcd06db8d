"""Does the estimate order plans for TPUs as their compiled and replayed programs do?

    python -m benchmarks.tpu_rank [--model base]... [--target v5e:4x4]... [--limit 5] [--causes]

For three shapes of the dense example and one of the one with experts: all 15 (dp, fsdp, tp) meshes
of `v5e:4x4`, and 40 plans of `tpu-v5p-128` drawn at random from the shipped search space. Each is
compiled at default effort for the target (no TPU, but the `tpu` extra), its schedule is replayed on
the links that its groups use, and the time is held against the estimate that a search makes without
compiling. About 220 compiles of half a minute, and 135 of some seconds: all meshes of `v5e:4x4` for
nine steps that are no language models. What finishes is kept in `results/tpu_rank`, and the same
command goes on.

Estimate and replay share the formulas of collectives, the links under each set of axes and the
speeds of the chip's data sheet. A good figure here says that the estimate sees the right program:
bytes moved, what overlaps, products, memory traffic. It says nothing about how fast a TPU is.

`base` was looked at while the estimate was tuned; `wide`, `narrow` and `routed` were not. Neither
`wide` nor `narrow` is far from what was: recorded schedules for `v5e:4x4` of another
implementation, as wide and with the same batches, but of other depths.
Kendall's tau is over the plans that fit; pairs are those whose replays are more than 5 % apart; the
regret of the top 3 is that of the best of the three plans with the lowest estimates. The last line
on stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from scipy import stats

from automesh.mesh.axes import Plan
from benchmarks.support.compiles import Bench, Case, Played, bench, say
from benchmarks.support.spaces import with_usual_axes

DEVICES = "v5e:4x4"
POD = "tpu-v5p-128"
_DRAWN = 40
_SEED = 4
_APART = 0.05
# Meshes alone, at the knobs' defaults.
_MESHES = with_usual_axes("""
[axes]
dp = {}
fsdp = {}
tp = {}
""")


def _cases(name: str, script: str, space: str) -> tuple[Case, Case]:
    return (
        Case(name=name, script=script, argv=("--size", name), target=DEVICES, space=_MESHES),
        Case(name=name, script=script, argv=("--size", f"{name}-pod"), target=POD, space=space),
    )


# Steps that are no language models, of those that `benchmarks.terms` has.
_OTHERS = (
    "convnet",
    "diffusion_transformer",
    "embedding",
    "gnn",
    "rnn",
    "sorted_moe",
    "state_space",
    "unet",
    "vit",
)
CASES = (
    *_cases("base", "benchmarks/support/scripts/dense_shapes.py", "dense_lm"),
    *_cases("wide", "benchmarks/support/scripts/dense_shapes.py", "dense_lm"),
    *_cases("narrow", "benchmarks/support/scripts/dense_shapes.py", "dense_lm"),
    *_cases("routed", "benchmarks/support/scripts/moe_shapes.py", "moe_lm"),
    *(
        Case(
            name=name,
            script=f"benchmarks/support/scripts/steps/{name}.py",
            argv=(),
            target=DEVICES,
            space=_MESHES,
        )
        for name in _OTHERS
    ),
)


def drawn(legal: Sequence[Plan], case: Case) -> Sequence[Plan]:
    """All meshes of the small target; of the large one, plans drawn at random, always the same."""
    if case.target == DEVICES or len(legal) <= _DRAWN:
        return legal
    chosen = random.Random(_SEED).sample(sorted(legal, key=str), _DRAWN)
    return sorted(chosen, key=str)


def figures(played: Sequence[Played]) -> dict[str, Any]:
    """How well the estimates order the plans that were replayed."""
    ours = {one.plan: one.estimated.step_s for one in played if one.replay}
    truth = {one.plan: one.replay.step_s for one in played if one.replay}
    failed = [one for one in played if one.replay is None]
    counted: dict[str, Any] = {"plans": len(truth), "without_time": len(failed)}
    if len(truth) < 2:
        return counted
    right, apart = ordered_pairs(ours, truth)
    ranking, best = sorted(ours, key=lambda plan: ours[plan]), min(truth.values())
    tau: Any = stats.kendalltau(list(ours.values()), list(truth.values()))
    return {
        "kendall_tau": round(float(tau.statistic), 4),
        "pairs_ordered": round(right / apart, 4) if apart else 1.0,
        "top1_regret": round(truth[ranking[0]] / best - 1.0, 4),
        "top3_regret": round(min(truth[plan] for plan in ranking[:3]) / best - 1.0, 4),
        **counted,
        "pairs_apart": apart,
    }


def ordered_pairs(ours: dict[Plan, float], truth: dict[Plan, float]) -> tuple[int, int]:
    """Of the pairs that are more than 5 % apart: those ordered as they should be, and all."""
    right = apart = 0
    for one, other in itertools.combinations(truth, 2):
        fast, slow = sorted((one, other), key=lambda plan: truth[plan])
        if truth[slow] > (1.0 + _APART) * truth[fast]:
            apart += 1
            right += ours[fast] < ours[slow]
    return right, apart


def table(played: Sequence[Played], *, with_causes: bool) -> list[str]:
    """One line per plan, the fastest first; with the causes of both sides below, in ms."""
    lines: list[str] = []
    times = [(one, one.replay) for one in played if one.replay]
    for one, replay in sorted(times, key=lambda pair: pair[1].step_s):
        estimate = one.estimated.step_s
        off = estimate / replay.step_s - 1.0
        lines.append(
            f"{one.plan!s:<44}{estimate * 1e3:>9.1f}{replay.step_s * 1e3:>9.1f}{off:>+8.1%}"
        )
        if with_causes:
            lines += _causes(one)
    lines += [f"{one.plan!s:<44}{one.failure}" for one in played if one.replay is None]
    return lines


def _causes(one: Played) -> list[str]:
    assert one.replay is not None
    ours, theirs = dict(one.estimated.causes), dict(one.replay.causes)
    return [
        f"    {cause:<40}{ours.get(cause, 0.0) * 1e3:>9.1f}{theirs.get(cause, 0.0) * 1e3:>9.1f}"
        for cause in dict.fromkeys([*ours, *theirs])
        if max(ours.get(cause, 0.0), theirs.get(cause, 0.0)) > 0.005 * one.replay.step_s
    ]


def _shown(one: Bench, played: Sequence[Played], *, with_causes: bool) -> None:
    print(f"{one.case.name} on {one.case.target}")
    print(f"{'plan':<44}{'estimate':>9}{'replay':>9}{'error':>8}   ms")
    for line in table(played, with_causes=with_causes):
        print(line)
    for plan, reason in one.missing.items():
        print(f"{plan!s:<44}not estimated: {reason}")


def main(
    model: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only this one, likewise.")] = None,
    limit: Annotated[
        int, typer.Option(min=0, help="Compile at most so many plans of each; 0: all.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Compiles side by side.")] = 2,
    folder: Annotated[Path, typer.Option(help="For records.")] = Path("results/tpu_rank"),
    causes: Annotated[bool, typer.Option("--causes", help="Show what causes the times.")] = False,
    replay: Annotated[bool, typer.Option("--replay", help="Compile nothing more.")] = False,
) -> None:
    """Compiles, replays, and prints how well the estimates order the plans."""
    summary: dict[str, dict[str, Any]] = {}
    for case in CASES:
        if (model and case.name not in model) or (target and case.target not in target):
            continue
        with bench(case, folder.absolute(), lambda legal, case=case: drawn(legal, case)) as one:
            # Drawn, so that a part of them is as good a sample as all.
            order = random.Random(_SEED).sample(one.plans, len(one.plans))
            if not replay:
                one.compile(order[:limit] if limit else order, workers=workers)
            played = one.played(one.plans)
        _shown(one, played, with_causes=causes)
        found = figures(played)
        summary.setdefault(case.name, {})[case.target] = found
        say(f"{case.slug}: {json.dumps(found)}")
    print(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
