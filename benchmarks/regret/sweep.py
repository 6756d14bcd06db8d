"""Exhaustive measurement of every legal plan of an example, kept in a file and resumable.

Every plan is compiled as a search compiles it, visited as a race visits it, and in the same worker
process; rounds go over all plans in an order of their own, so that a drift of the machine spreads
over all. Of a visit the lower quartile of its steps counts, not the median: whatever else runs on
the cores only adds, and between visits to one plan the median varies twice as much. Plans with the
same program share their figures.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from automesh.jsonio import from_json
from automesh.mesh.axes import Plan
from automesh.outcomes import Failure
from automesh.program.nouns import CompileAnswer, Entry, Inspection, Lowered, StepRef, VisitAnswer
from automesh.space.legal import find_legal
from automesh.space.settings import StepFacts
from automesh.space.spec import read_space
from automesh.tuner.measure.schedule import (
    Calibration,
    Subject,
    VisitRules,
    calibrate,
    visit,
    visit_job,
)
from automesh.units import format_wait
from automesh.worker.messages import CompileJob, InspectJob, Surroundings, VisitJob
from automesh.worker.pool import Pool
from benchmarks.support.paths import EXAMPLES

DEVICES = 8
SCHEMA = 2
_MEMORY_BYTES = 6 * 2**30
_TIMEOUT_S = 300.0
# Every step is a sample of its own.
RULES = VisitRules(sample_s=0.0, samples=16, warmup_s=0.05, loss_steps=0, timeout_s=_TIMEOUT_S)
_QUARTILE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What is swept.

    Attributes:
      script: in `examples/`.
      argv: its arguments.
      space: TOML of the search space; knobs are chosen so that times spread.
    """

    name: str
    script: str
    argv: tuple[str, ...]
    space: str

    @property
    def entry(self) -> Entry:
        return Entry(kind="script", location=str(EXAMPLES / self.script), argv=self.argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan's record.

    Attributes:
      plan: as text.
      fingerprint: of its program; plans with an equal one share their rounds.
      compile_s: spent on compiling it, 0 for a shared program.
      steps, samples: of one visit.
      rounds_s: seconds per step, one per round.
      visits_s: seconds that the device was kept busy, one per round: the cost of a measurement.
      first_s: seconds of the first visit, in which the executable is loaded.
      failure: why there is no time; empty if there is.
    """

    plan: str
    fingerprint: str = ""
    compile_s: float = 0.0
    steps: int = 0
    samples: int = 0
    rounds_s: tuple[float, ...] = ()
    visits_s: tuple[float, ...] = ()
    first_s: float = 0.0
    failure: str = ""


@dataclass(slots=True, kw_only=True)
class Table:
    """The record of one example.

    Attributes:
      path: where it is kept.
      header: what must be equal for a record to be gone on with.
    """

    path: Path
    header: dict[str, Any]
    rows: dict[str, Row] = field(default_factory=dict[str, Row])

    @staticmethod
    def open(path: Path, header: dict[str, Any]) -> Table:
        """Reads what an earlier sweep has kept; starts anew if it was of something else."""
        table = Table(path=path, header=header)
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["header"] == json.loads(json.dumps(header)):
                table.rows = {row["plan"]: _row(row) for row in kept["rows"]}
            else:
                say(f"{path} is of another script, space or version: starting anew")
        return table

    def put(self, row: Row) -> None:
        self.rows[row.plan] = row

    def save(self) -> None:
        """Whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = {"header": self.header, "rows": [asdict(row) for row in self.rows.values()]}
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(self.path)

    def measured(self) -> list[Row]:
        """Plans with a time; those with a shared program have the figures of the one measured."""
        by_program = {row.fingerprint: row for row in self.rows.values() if row.rounds_s}
        found: list[Row] = []
        for row in self.rows.values():
            own = by_program.get(row.fingerprint)
            if own is not None and not row.failure:
                found.append(replace(own, plan=row.plan))
        return found


def _row(data: Any) -> Row:
    return from_json(data, Row)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One example, ready to be measured.

    Attributes:
      plans: every legal one, in the order of the enumeration.
    """

    example: Example
    inspection: Inspection
    plans: tuple[Plan, ...]
    folder: Path

    @property
    def cache_dir(self) -> str:
        return str(self.folder / self.example.name / "cache")

    @property
    def table_path(self) -> Path:
        return self.folder / f"{self.example.name}.json"

    def header(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "script": self.example.script,
            "argv": list(self.example.argv),
            "space": self.example.space,
            "source_hash": self.inspection.source_hash,
            "versions": [list(pair) for pair in self.inspection.versions],
            "rules": asdict(RULES),
        }


def space_file(example: Example, folder: Path) -> Path:
    """The example's search space as a file."""
    path = folder / example.name / "space.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(example.space, encoding="utf-8")
    return path


def prepare(example: Example, folder: Path) -> Sweep:
    """Inspects an example and lists its legal plans."""
    space = read_space(str(space_file(example, folder)))
    with open_pool(1, folder / example.name / "logs") as pool:
        found = pool.run(
            InspectJob(step=StepRef(entry=example.entry), axis_names=space.names), _TIMEOUT_S
        )
    if not isinstance(found, Inspection):
        raise SystemExit(f"{example.script} cannot be inspected: {found}")
    facts = StepFacts(
        facts=found.facts,
        used_axes=found.used_axes,
        knobs=found.knobs,
        takes_any_knob=found.takes_any_knob,
    )
    legal = find_legal(space, facts, num_devices=DEVICES, num_granules=1, platform="cpu").legal
    return Sweep(example=example, inspection=found, plans=tuple(legal), folder=folder)


def open_pool(size: int, logs: Path) -> Pool:
    return Pool(
        size=size,
        surroundings=Surroundings(platforms="cpu", cpu_devices=DEVICES),
        log_dir=logs,
        memory_limit_bytes=_MEMORY_BYTES,
    )


def sweep(
    one: Sweep, *, rounds: int, workers: int, limit: int = 0, seed: int = 0
) -> tuple[Table, float]:
    """Compiles and measures what the record does not hold yet.

    Args:
      rounds: visits to each program.
      workers: compiles side by side.
      limit: measure only so many plans, drawn at random; 0: all.

    Returns:
      The record, and the seconds that this call took.
    """
    began_s = time.monotonic()
    table = Table.open(one.table_path, one.header())
    plans = list(one.plans)
    luck = random.Random(seed)
    luck.shuffle(plans)
    plans = plans[: limit or None]
    logs = one.folder / one.example.name / "logs"
    with open_pool(workers, logs) as pool:
        _compile(one, table, plans, pool)
    chosen = _one_per_program(table, plans)
    with open_pool(1, logs) as pool:
        _measure(one, table, chosen, _Visitors(pool), rounds=rounds, luck=luck)
    return table, time.monotonic() - began_s


def _compile(one: Sweep, table: Table, plans: Sequence[Plan], pool: Pool) -> None:
    """Compiles into the cache; a program that is there, or under way, is only lowered."""
    wanted = [plan for plan in plans if str(plan) not in table.rows]
    known = {row.fingerprint for row in table.rows.values()}
    tickets: dict[int, Plan] = {}

    def on_event(event: dict[str, Any]) -> dict[str, Any] | None:
        fingerprint = str(event.get("fingerprint", ""))
        if not fingerprint:
            return None
        is_new = fingerprint not in known
        known.add(fingerprint)
        return {"go": is_new}

    for plan in wanted:
        job = CompileJob(
            step=StepRef(
                entry=one.example.entry,
                axis_types=one.inspection.axis_types,
                facts=one.inspection.facts,
            ),
            plan=plan,
            cache_dir=one.cache_dir,
        )
        tickets[pool.submit(job, _TIMEOUT_S, on_event=on_event)] = plan
    began_s, done = time.monotonic(), 0
    while tickets:
        for finished in pool.wait(1.0):
            plan = str(tickets.pop(finished.ticket))
            result = finished.result
            if isinstance(result, CompileAnswer):
                row = Row(plan=plan, fingerprint=result.fingerprint, compile_s=result.compile_s)
            elif isinstance(result, Lowered):
                row = Row(plan=plan, fingerprint=result.fingerprint)
            else:
                row = Row(plan=plan, failure=f"{type(result).__name__}: {_why(result)}")
            table.put(row)
            table.save()
            done += 1
            left_s = (time.monotonic() - began_s) / done * (len(wanted) - done)
            say(f"{one.example.name} compiled {done}/{len(wanted)}, {format_wait(left_s)} left")


def _one_per_program(table: Table, plans: Sequence[Plan]) -> list[Plan]:
    """The plans to run: for each program the one that has rounds already, else the first."""
    chosen: dict[str, Plan] = {}
    for plan in plans:
        row = table.rows[str(plan)]
        if not row.fingerprint or row.failure:
            continue
        there = chosen.get(row.fingerprint)
        if there is None or (row.rounds_s and not table.rows[str(there)].rounds_s):
            chosen[row.fingerprint] = plan
    return list(chosen.values())


@dataclass(frozen=True, slots=True)
class _Visitors:
    """A pool that is only asked for visits."""

    pool: Pool

    def run(self, job: VisitJob, timeout_s: float) -> VisitAnswer | Failure:
        answer = self.pool.run(job, timeout_s)
        if isinstance(answer, VisitAnswer | Failure):
            return answer
        raise TypeError(f"a visit was answered with {type(answer).__name__}")

    def recycle(self) -> None:
        self.pool.recycle()


def _measure(
    one: Sweep,
    table: Table,
    plans: Sequence[Plan],
    pool: _Visitors,
    *,
    rounds: int,
    luck: random.Random,
) -> None:
    """Visits every plan once per round, each round in another order."""
    subject = Subject(
        step=StepRef(
            entry=one.example.entry,
            axis_types=one.inspection.axis_types,
            facts=one.inspection.facts,
        ),
        cache_dir=one.cache_dir,
    )
    missing = [plan for plan in plans if len(table.rows[str(plan)].rounds_s) < rounds]
    known = _first_visits(one, table, missing, pool, subject)
    for number in range(rounds):
        order = [plan for plan in known if len(table.rows[str(plan)].rounds_s) <= number]
        luck.shuffle(order)
        began_s = time.monotonic()
        for done, plan in enumerate(order, start=1):
            _visit(table, pool, subject, known[plan])
            if done % 10 == 0 or done == len(order):
                table.save()
                left_s = (time.monotonic() - began_s) / done * (len(order) - done)
                where = f"{one.example.name} round {number + 1}/{rounds}"
                say(f"{where}: {done}/{len(order)}, {format_wait(left_s)} left")


def _first_visits(
    one: Sweep, table: Table, plans: Sequence[Plan], pool: _Visitors, subject: Subject
) -> dict[Plan, Calibration]:
    """Loads every program and finds how many steps make a sample."""
    known: dict[Plan, Calibration] = {}
    for done, plan in enumerate(plans, start=1):
        began_s = time.monotonic()
        found = calibrate(pool, subject, plan, rules=RULES, clock=time.monotonic)
        row = table.rows[str(plan)]
        if isinstance(found, Calibration):
            known[plan] = found
            first_s = time.monotonic() - began_s
            # Rounds are only comparable if all of a plan's visits are of one length.
            steps = row.steps or found.steps
            known[plan] = replace(found, steps=steps, samples=row.samples or found.samples)
            table.put(replace(row, steps=steps, samples=known[plan].samples, first_s=first_s))
        else:
            table.put(replace(row, failure=f"{type(found).__name__}: {_why(found)}"))
        if done % 10 == 0 or done == len(plans):
            table.save()
            say(f"{one.example.name} loaded {done}/{len(plans)}")
    return known


def _visit(table: Table, pool: _Visitors, subject: Subject, known: Calibration) -> None:
    row = table.rows[str(known.plan)]
    job = visit_job(
        subject,
        known.plan,
        steps=known.steps,
        samples=known.samples,
        loss_steps=0,
        warmup_s=RULES.warmup_s,
    )
    began_s = time.monotonic()
    answer = visit(pool, job, RULES.timeout_s)
    took_s = time.monotonic() - began_s
    if isinstance(answer, VisitAnswer):
        step_s = float(np.quantile(answer.samples_s, _QUARTILE))
        table.put(replace(row, rounds_s=(*row.rounds_s, step_s), visits_s=(*row.visits_s, took_s)))
    else:
        table.put(replace(row, failure=f"{type(answer).__name__}: {_why(answer)}"))


def _why(result: object) -> str:
    return str(getattr(result, "reason", "") or result)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)
