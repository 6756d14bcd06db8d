"""Compiles and times every plan of some steps on the attached device."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from automesh.hardware import parse_target
from automesh.hardware.targets import selector_of
from automesh.mesh.axes import Plan
from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.program.nouns import CompileAnswer, Inspection, StepRef, VisitAnswer
from automesh.space.legal import find_legal
from automesh.space.settings import StepFacts
from automesh.space.spec import read_space
from automesh.tuner.workers import surroundings_of
from automesh.units import format_seconds
from automesh.worker.messages import CompileJob, InspectJob, VisitJob
from automesh.worker.pool import Pool
from benchmarks.attached.record import Record, Row, Step, kept, read_record
from benchmarks.support.compiles import say

_TIMEOUT_S = 300.0
_WORKER_BYTES = 64 * 2**30
# Visits of the same plan mostly differ by less than 0.5 %, by 1.8 % at most.
_STEPS, _SAMPLES, _WARMUP_S = 2, 4, 0.3


def measure(target_name: str, steps: Sequence[Step], path: Path, folder: Path) -> Record:
    """Compiles and visits every plan; the record is kept after each of them.

    Args:
      path: of the record; rows of other steps that it holds of the same device stay.
      folder: for executables, spaces and logs.

    Raises:
      SystemExit: the record is of another device, or no step could be inspected.
    """
    target = parse_target(target_name, os.environ)
    record: Record | None = None
    with Pool(
        size=1,
        surroundings=surroundings_of(target),
        log_dir=folder / "logs",
        memory_limit_bytes=_WORKER_BYTES,
    ) as pool:
        for step in steps:
            space = read_space(_space_file(step, folder))
            found = pool.run(
                InspectJob(step=StepRef(entry=step.entry), axis_names=space.names), _TIMEOUT_S
            )
            if not isinstance(found, Inspection):
                say(f"{step.name} cannot be inspected: {found}")
                continue
            first = found.devices[0]
            if record is None:
                record = _begun(
                    Record(
                        selector=selector_of(found.devices),
                        platform=first.platform,
                        device_kind=first.kind,
                        limit_bytes=found.device_memory_bytes,
                        versions=found.versions,
                        steps=tuple(steps),
                    ),
                    path,
                )
            facts = StepFacts(
                facts=found.facts,
                used_axes=found.used_axes,
                knobs=found.knobs,
                takes_any_knob=found.takes_any_knob,
            )
            plans = find_legal(
                space,
                facts,
                num_devices=len(found.devices),
                num_granules=1,
                platform=first.platform,
            ).legal
            ref = StepRef(entry=step.entry, axis_types=found.axis_types, facts=found.facts)
            record = _measured(step, ref, plans, pool, record, path, folder)
    if record is None:
        raise SystemExit("none of the steps could be inspected")
    return record


def _begun(record: Record, path: Path) -> Record:
    """The record with what an earlier call has measured of other steps on the same device."""
    if not path.exists():
        return record
    before = read_record(path)
    if (before.selector, before.versions) != (record.selector, record.versions):
        raise SystemExit(
            f"`{path}` is of {before.selector} with other versions: name another --data"
        )
    names = {step.name for step in record.steps}
    return replace(
        record,
        steps=(*(step for step in before.steps if step.name not in names), *record.steps),
        rows=tuple(row for row in before.rows if row.step not in names),
    )


def _measured(
    step: Step,
    ref: StepRef,
    plans: Sequence[Plan],
    pool: Pool,
    record: Record,
    path: Path,
    folder: Path,
) -> Record:
    cache = str(folder.absolute() / "cache")
    rows: dict[Plan, Row] = {}
    for number, plan in enumerate(plans, start=1):
        job = CompileJob(step=ref, plan=plan, cache_dir=cache)
        answer = pool.run(job, _TIMEOUT_S, lambda _: {"go": True})
        row = Row(step=step.name, plan=str(plan))
        if isinstance(answer, CompileAnswer):
            row = replace(
                row, compile_s=answer.compile_s, memory=answer.memory, counts=answer.counts
            )
        else:
            row = replace(row, failure=_why(answer))
        rows[plan] = row
        record = kept(record.put(row), path)
        said = row.failure or f"compiled in {row.compile_s:.1f} s"
        say(f"{step.name} {number}/{len(plans)} {plan}: {said}")
    ready = sorted(
        (plan for plan, row in rows.items() if row.memory is not None),
        key=lambda plan: rows[plan].stated_bytes,
    )
    for order in (ready, ready[::-1]):
        for plan in order:
            row = rows[plan]
            if row.failure:
                continue
            job = VisitJob(
                step=ref,
                plan=plan,
                cache_dir=cache,
                steps=_STEPS,
                samples=_SAMPLES,
                loss_steps=0,
                warmup_s=_WARMUP_S,
            )
            began_s = time.monotonic()
            answer = pool.run(job, _TIMEOUT_S)
            if isinstance(answer, VisitAnswer):
                middle = statistics.median(answer.samples_s)
                spread = (max(answer.samples_s) - min(answer.samples_s)) / middle
                row = replace(
                    row,
                    rounds_s=(*row.rounds_s, middle),
                    spread=max(row.spread, spread),
                    peak_bytes=row.peak_bytes or answer.peak_bytes,
                )
            else:
                row = replace(row, failure=_why(answer))
            rows[plan] = row
            record = kept(record.put(row), path)
            said = row.failure or f"{format_seconds(row.rounds_s[-1])} a step"
            say(f"{step.name} {plan}: {said}, visit of {time.monotonic() - began_s:.1f} s")
    return record


def _why(answer: object) -> str:
    match answer:
        case OutOfMemory():
            return f"out of memory ({answer.stage}): {answer.detail}"
        case Failed():
            return f"failed ({answer.stage}): {answer.reason}"
        case TimedOut():
            return f"stopped after {answer.limit_s:.0f} s"
        case _:
            return f"answered with {type(answer).__name__}"


def _space_file(step: Step, folder: Path) -> str:
    path = folder / f"{step.name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(step.space, encoding="utf-8")
    return str(path)
