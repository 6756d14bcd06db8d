"""How much slower than the best mesh is what a search finds, and what does finding it cost?

Measures every legal plan (mesh and knobs) of the three examples on eight virtual CPU devices, then
lets the search, Optuna's samplers and a rule of thumb choose from what was measured. A test of the
machinery: virtual devices share the cores of one host, so nothing here is a claim about
accelerators. Records are kept in `results/regret`; a sweep that was stopped goes on where it was.
The last line on stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from automesh import api
from automesh.hardware import parse_target
from automesh.hardware.calibration.profile_files import FOLDER_VARIABLE
from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated
from automesh.report.progress import Silent
from automesh.space.spec import read_space
from automesh.tuner.session import open_session
from benchmarks.regret.replay import figures, record_of
from benchmarks.regret.sweep import DEVICES, Example, Sweep, Table, prepare, say, space_file, sweep
from benchmarks.support.spaces import with_usual_axes

_TARGET = f"cpu:{DEVICES}"
_ESTIMATE = "1h"
_ROUNDS = 5

_COMMON = """
[constraints]
"{rows}*microbatches" = {{ divides = "batch" }}
fsdp = {{ divides = "d_model" }}
tp = {{ divides = "num_kv_heads" }}
{more}
[knobs]
remat = ["none", "full"]
microbatches = [{microbatches}]
"""


def _space(axes: str, *, rows: str, more: str, microbatches: str) -> str:
    lines = "\n".join(f"{axis} = {{}}" for axis in axes.split())
    common = _COMMON.format(rows=rows, more=more, microbatches=microbatches)
    return with_usual_axes(f"[axes]\n{lines}\n{common}")


# Knobs that change the work (remat) and the number of collectives (microbatches) spread the times:
# the meshes of so small a model alone lie within a few per cent of each other.
EXAMPLES = (
    Example(
        name="dense_lm",
        script="dense_lm.py",
        argv=("--size", "tiny"),
        space=_space(
            "dp fsdp tp sp",
            rows="dp*fsdp",
            more='sp = { divides = "seq" }',
            microbatches="1, 2, 3, 6",
        ),
    ),
    Example(
        name="moe_lm",
        script="moe_lm.py",
        argv=("--size", "tiny"),
        space=_space(
            "dp fsdp ep tp",
            rows="dp*fsdp*ep",
            more='ep = { divides = "num_experts" }',
            microbatches="1, 2, 3, 6",
        ),
    ),
    Example(
        name="long_context",
        script="long_context.py",
        argv=("--size", "tiny"),
        space=_space(
            "dp fsdp tp sp",
            rows="dp*fsdp",
            more='sp = { divides = "seq" }',
            microbatches="1, 2, 3, 6",
        ),
    ),
)


def estimates_of(one: Sweep) -> tuple[Mapping[Plan, Estimated], str]:
    """The estimates that a search would rank by, and where their speeds come from."""
    example = one.example
    space = space_file(example, one.folder)
    options = api.SearchOptions(
        args=example.argv, space=space, budget=_ESTIMATE, top=1, results=one.folder, dry_run=True
    )
    request = api.read_request(example.entry.location, options, targets=[_TARGET])
    target = parse_target(_TARGET, os.environ)
    terms = one.folder / example.name / "terms"
    with open_session(request, target, read_space(str(space)), Silent()) as session:
        estimates = session.estimate(share=1.0, terms_folder=terms)
    return estimates.found, estimates.origin


def calibrate(folder: Path, budget: str) -> float:
    """Measures the virtual devices, unless that was done; the seconds that it took."""
    # A profile of its own: what the user has calibrated stays as it is.
    os.environ[FOLDER_VARIABLE] = str((folder / "profiles").absolute())
    if list((folder / "profiles").glob("*.json")):
        return 0.0
    began_s = time.monotonic()
    api.calibrate(_TARGET, budget=budget)
    return time.monotonic() - began_s


def main(
    examples: Annotated[
        list[str] | None, typer.Option("--example", help="Only this one; may be repeated.")
    ] = None,
    plans: Annotated[
        int, typer.Option(min=0, help="Measure so many plans drawn at random; 0: all.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=2, help="Visits to each plan.")] = _ROUNDS,
    workers: Annotated[int, typer.Option(min=1, help="Compiles side by side.")] = 2,
    seeds: Annotated[int, typer.Option(min=5, help="Runs of each sampler.")] = 50,
    calibration: Annotated[str, typer.Option(help="Time for the calibration.")] = "60s",
    folder: Annotated[Path, typer.Option(help="For records.")] = Path("results/regret"),
    replay: Annotated[bool, typer.Option("--replay", help="Measure nothing more.")] = False,
) -> None:
    """Sweeps, replays, and prints regret and cost of every strategy."""
    folder.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"calibration_s": round(calibrate(folder, calibration), 1)}
    for example in EXAMPLES:
        if examples and example.name not in examples:
            continue
        one = prepare(example, folder)
        say(f"{example.name}: {len(one.plans)} legal plans")
        limit = plans or len(one.plans)
        table, took_s = (
            (Table.open(one.table_path, one.header()), 0.0)
            if replay
            else sweep(one, rounds=rounds, workers=workers, limit=limit)
        )
        if not table.measured():
            raise SystemExit(f"{one.table_path} holds no measurements of {example.name} as it is")
        began_s = time.monotonic()
        estimates, origin = estimates_of(one)
        estimate_s = time.monotonic() - began_s
        failures = [row for row in table.rows.values() if row.failure]
        for row in failures:
            say(f"{example.name}: {row.plan} has no time: {row.failure}")
        record = record_of(table.measured(), one.plans)
        summary[example.name] = {
            **figures(record, estimates, one.plans[0], seeds=seeds),
            "failed": len(failures),
            "sweep_s": round(took_s, 1),
            "compile_s": round(sum(row.compile_s for row in table.rows.values()), 1),
            "estimate_s": round(estimate_s, 1),
            "speeds": origin,
        }
        say(json.dumps({example.name: summary[example.name]}, indent=1))
    print(json.dumps(summary))
