"""Do estimates and compiled predictions agree with what one attached accelerator takes?

    automesh calibrate --out FOLDER/NAME.json            where the accelerator is
    python -m benchmarks.attached --measure --data FOLDER      likewise
    python -m benchmarks.attached --measure --others --data FOLDER
    python -m benchmarks.attached --trace --data FOLDER
    python -m benchmarks.attached                        there, or anywhere else

`--measure` compiles every plan of three examples for the attached device (remat and microbatches
are the knobs; one device has one mesh), visits each plan in two rounds of opposite order, and keeps
times and memory; with `--others`, of ten steps that are no language models, in sizes that fill a
GPU and as small as `benchmarks.terms` has them. Plans are visited in the order of the memory that
the compiler states, so that the device's high-water mark rises with them: where it does not rise,
that plan's memory is not known. `--trace` keeps the program of one plan of each, and what its
kernels take.

Without these every record is compared with four predictions of each plan: the estimates with the
data sheet and with the calibration, the counts of the attached compiler's program, and, where the
compiler for absent devices of that kind is installed, the replay of what that one schedules. The
programs that were traced are replayed, too, and what searches have measured (`*_trials.csv`) stands
beside what they had predicted.

The last line on stdout is JSON; progress goes to stderr.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from automesh.hardware import parse_target
from automesh.hardware.calibration.measured_speeds import speeds_for
from automesh.hardware.calibration.profile_files import read_profile
from automesh.hardware.fabric.fabric import Layouts
from automesh.hardware.model import HardwareModel
from benchmarks.attached.compare import compare, figures, table
from benchmarks.attached.measure import measure
from benchmarks.attached.programs import lines_of, programs_in
from benchmarks.attached.record import OTHERS, STEPS, TINY, Record, read_record
from benchmarks.attached.searches import figures_of, searched_in
from benchmarks.attached.searches import lines_of as told_of
from benchmarks.attached.trace import trace
from benchmarks.support.compiles import say
from benchmarks.support.paths import DATA

_TRACED_MICROBATCHES = 2
_RECORD = "record.json"


def main(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of a record, of traces, and of a profile; by default all."),
    ] = None,
    is_measuring: Annotated[
        bool, typer.Option("--measure", help="Measure the attached device.")
    ] = False,
    is_tracing: Annotated[
        bool, typer.Option("--trace", help="Trace one plan of each example on the attached GPU.")
    ] = False,
    traced_remat: Annotated[
        str, typer.Option(help="With --trace: of the plan, where a step has that knob.")
    ] = "none",
    target: Annotated[str, typer.Option(help="With --measure: local, or cpu:1.")] = "local",
    examples: Annotated[
        list[str] | None, typer.Option("--example", help="Only this one; may be repeated.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The smallest sizes, to try it.")] = False,
    others: Annotated[
        bool, typer.Option("--others", help="Steps that are no language models instead.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="For what is compiled.")] = Path("results/attached"),
    workers: Annotated[int, typer.Option(min=1, help="Compiles side by side.")] = 2,
) -> None:
    """Measures one attached device, or compares what was measured with what is predicted."""
    steps = OTHERS if others else TINY if tiny else STEPS
    wanted = [one for one in steps if not examples or one.name in examples]
    if not wanted:
        raise SystemExit(f"--example: one of {', '.join(one.name for one in steps)}")
    if is_measuring or is_tracing:
        if data is None:
            raise SystemExit("--data: the folder that what is measured goes to")
        if is_measuring:
            record = measure(target, wanted, data / _RECORD, folder)
            timed = sum(bool(row.rounds_s) for row in record.rows)
            print(json.dumps({"device": record.device_kind, "timed": timed}))
        if is_tracing:
            traced = {"remat": traced_remat, "microbatches": _TRACED_MICROBATCHES}
            for step in wanted:
                knobs = {name: value for name, value in traced.items() if step.has(name)}
                say(f"{step.name}: {trace(step, knobs, data)}")
            print(json.dumps({"traced": [step.name for step in wanted]}))
        return
    summary: dict[str, Any] = {}
    for one in sorted((DATA / "attached").iterdir()) if data is None else [data]:
        summary[one.name] = _compared(one, folder, examples or (), workers=workers)
    print(json.dumps(summary))


def _compared(data: Path, folder: Path, names: Collection[str], *, workers: int) -> dict[str, Any]:
    """Prints how one record compares.

    Args:
      names: of the steps that count; none: all.

    Returns:
      The figures.
    """
    if not (data / _RECORD).exists():
        raise SystemExit(f"there is no record in `{data}`: make one with --measure")
    record = read_record(data / _RECORD).only(names)
    if parse_target(record.selector, os.environ).absent is None:
        raise SystemExit(f"`{data / _RECORD}` is of {record.selector}: only accelerators compare")
    print(record.device_kind)
    found = compare(record, folder, data, workers=workers)
    for line in table(found):
        print(line)
    for row in record.rows:
        if row.failure:
            print(f"{row.step} {row.plan}: {row.failure}")
    summary: dict[str, Any] = figures(found)
    searches = [one for one in searched_in(data, record) if not names or one.step in names]
    for line in told_of(searches):
        print(line)
    if searches:
        summary["searches"] = figures_of(searches)
    for hardware in _hardware(record, data):
        played = programs_in(data, record, hardware)
        programs = [one for one in played if not names or one.step in names]
        for line in lines_of(programs, hardware.speeds.origin):
            print(line)
        summary.setdefault("programs", []).append([round(one.error, 4) for one in programs])
    return summary


def _hardware(record: Record, data: Path) -> list[HardwareModel]:
    """The device with the speeds of its data sheet, and with those of its calibration."""
    absent = parse_target(record.selector, os.environ).absent
    assert absent is not None
    fabric = absent.fabric
    profiles = [read_profile(path) for path in sorted(data.glob("gpu-*.json"))]
    return [
        HardwareModel(
            fabric=fabric,
            layouts=Layouts(shapes=(), spans=()),
            speeds=speeds_for(fabric.chip, fabric, profile),
        )
        for profile in (None, *profiles)
    ]
