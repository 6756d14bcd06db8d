"""The plans of a case, visited in a gang of two processes and in one process alone."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from automesh import api
from automesh.hardware import parse_target
from automesh.jsonio import from_json, to_json
from automesh.launch.cluster import workers_of
from automesh.mesh.axes import MeshAxis, Plan
from automesh.outcomes import Failure
from automesh.program.nouns import VisitAnswer
from automesh.report.progress import Progress
from automesh.report.words import failure_reason
from automesh.space.spec import read_space
from automesh.tuner.measure.schedule import (
    Calibration,
    Course,
    Subject,
    VisitRules,
    calibrate,
    visit,
    visit_job,
)
from automesh.tuner.preparation import Preparation
from automesh.tuner.session import open_session
from automesh.tuner.workers import memory_share_bytes, surroundings_of
from automesh.units import format_wait
from automesh.worker.messages import Surroundings
from automesh.worker.pool import Pool
from automesh.worker.process import Process, StartWorker
from benchmarks.support.compiles import say
from benchmarks.support.paths import EXAMPLES
from benchmarks.support.visitors import Visitors

TARGET, DEVICES = "cpu:4*2", 8
_SCHEMA = 1
_TIMEOUT_S = 600.0
RULES = VisitRules(timeout_s=_TIMEOUT_S)

_CONSTRAINTS = """
[constraints]
"{rows}" = {{ divides = "batch" }}
tp = {{ divides = "num_kv_heads" }}
{more}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step, and which of its axes are laid over DCN.

    Attributes:
      script: in `examples/`; its size is `tiny`, which computes in float32.
      axes: lines of the space's table `axes`; what is not searched has size 1.
      more: further constraints and knobs.
      rows: the product of axes and knobs that divides the rows of a batch.
      asked: the axis whose price over DCN is stated.
      over: the axes that must be over DCN in at least one plan.
      is_slower: whether `asked` has to be slower over DCN than inside.
    """

    name: str
    script: str
    axes: str
    rows: str
    asked: str
    over: tuple[str, ...]
    more: str = ""
    is_slower: bool = False

    @property
    def space(self) -> str:
        """TOML of the search space."""
        return f"[axes]\n{self.axes}\n" + _CONSTRAINTS.format(rows=self.rows, more=self.more)


CASES = (
    Case(
        name="dense_lm",
        script="dense_lm.py",
        axes="dp = { dcn = true }\nfsdp = { dcn = true }\nep = { size = 1 }\n"
        "tp = { dcn = true }\nsp = { size = 1 }",
        rows="dp*fsdp",
        more='fsdp = { divides = "d_model" }',
        asked="tp",
        over=("dp", "fsdp", "tp"),
        is_slower=True,
    ),
    Case(
        name="moe_lm",
        script="moe_lm.py",
        axes="dp = { dcn = true }\nfsdp = { size = 1 }\nep = { min = 2, dcn = true }\n"
        "tp = {}\nsp = { size = 1 }",
        rows="dp*ep",
        more='ep = { divides = "num_experts" }',
        asked="ep",
        over=("dp", "ep"),
    ),
    Case(
        name="pipeline",
        script="dense_lm.py",
        axes="pp = { size = 2, dcn = true }\ndp = { dcn = true }\nfsdp = { size = 1 }\n"
        "ep = { size = 1 }\ntp = {}\nsp = { size = 1 }",
        rows="dp*microbatches",
        more='pp = { divides = "num_layers" }\n[knobs]\nmicrobatches = [4]',
        asked="pp",
        over=("dp", "pp"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What lies between the two agents.

    Attributes:
      gbit: that it carries in each direction, 10^9 bit/s; None for what TCP inside a machine does.
      listen: what a search listens at, for agents that are there already; empty if it starts them.
    """

    gbit: float | None = None
    listen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is known of one plan.

    Attributes:
      first: its first visit in the gang, with its losses; None before it, or if it failed.
      rounds_s: seconds per step, a value for each round.
      failure: why it could not be visited; empty if it could.
    """

    plan: Plan
    first: Calibration | None = None
    rounds_s: tuple[float, ...] = ()
    failure: str = ""


@dataclass(slots=True, kw_only=True)
class Table:
    """The record of one case.

    Attributes:
      header: what must be equal for a record to be gone on with.
      alone: losses of the same meshes in one process, by plan.
    """

    path: Path
    header: dict[str, Any]
    rows: dict[str, Row] = field(default_factory=dict[str, Row])
    alone: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])

    @staticmethod
    def open(path: Path, header: dict[str, Any]) -> Table:
        """Reads what an earlier sweep has kept; starts anew if it was of something else."""
        table = Table(path=path, header=json.loads(json.dumps(header)))
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["header"] == table.header:
                rows = [from_json(one, Row) for one in kept["rows"]]
                # What failed may have failed by an accident, and is tried again.
                table.rows = {str(row.plan): row for row in rows if not row.failure}
                table.alone = {plan: tuple(losses) for plan, losses in kept["alone"].items()}
            else:
                say(f"{path} is of another script, space, version or network: starting anew")
        return table

    def put(self, row: Row) -> None:
        """Takes a row, and keeps it."""
        self.rows[str(row.plan)] = row
        self.save()

    def save(self) -> None:
        """Whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [to_json(row, Row) for row in self.rows.values()]
        data = {"header": self.header, "rows": rows, "alone": self.alone}
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(self.path)


class _Said(Progress):
    """What the search's own machinery has to say, on stderr."""

    def notice(self, text: str) -> None:
        say(text)


# Measuring.


def sweep(
    case: Case, folder: Path, network: Network, *, rounds: int, meshes: Sequence[str] = ()
) -> Table:
    """Measures what the record does not hold yet.

    Args:
      folder: for the record, and for logs.
      rounds: visits to each plan.
      meshes: only these; empty for all.
    """
    place = folder / case.name
    place.mkdir(parents=True, exist_ok=True)
    space = place / "space.toml"
    space.write_text(case.space, encoding="utf-8")
    options = api.SearchOptions(space=space, results=place, timeout=f"{_TIMEOUT_S:.0f}s")
    if network.listen:
        options.update(hosts=2, listen=network.listen)
    request = api.read_request(str(EXAMPLES / case.script), options, targets=[TARGET])
    target = parse_target(TARGET, os.environ)
    with workers_of(request, target, _Said()) as start_gang:
        with open_session(
            request, target, read_space(str(space)), _Said(), start_worker=start_gang
        ) as session:
            preparation = session.preparation
        table = Table.open(folder / f"{case.name}.json", _header(case, preparation, network))
        legal = session.legal.enumeration.legal
        plans = [plan for plan in legal if not meshes or plan.mesh in meshes]
        say(f"{case.name}: {len(plans)} of {len(legal)} plans, {len(table.rows)} are known")
        subject = Subject(
            step=preparation.step,
            cache_dir=str(place / "cache"),
            sources=preparation.inspection.sources,
            fits=lambda _: True,  # Of this size all states fit into the memory.
        )
        _run_alone(table, subject, plans, place)
        with _pool(surroundings_of(target), place, start_gang) as pool:
            _visit_first(case, table, subject, plans, Visitors(pool=pool))
            _visit_in_rounds(case, table, subject, plans, Visitors(pool=pool), rounds=rounds)
    wanted = {str(plan) for plan in plans}
    return replace(table, rows={name: row for name, row in table.rows.items() if name in wanted})


def _header(case: Case, preparation: Preparation, network: Network) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "script": case.script,
        "space": case.space,
        "source_hash": preparation.source_hash,
        "versions": [list(pair) for pair in preparation.inspection.versions],
        "rules": asdict(RULES),
        "network_gbit": network.gbit,
    }


def _pool(around: Surroundings, place: Path, start: StartWorker = Process) -> Pool:
    return Pool(
        size=1,
        surroundings=around,
        log_dir=place / "logs",
        memory_limit_bytes=memory_share_bytes(1),
        start=start,
    )


def alone_of(plan: Plan) -> Plan:
    """The same mesh with nothing over DCN.

    >>> str(alone_of(Plan(axes=(MeshAxis(name="dp", dcn=2), MeshAxis(name="tp", ici=4)))))
    'dp:2,tp:4'
    """
    return replace(plan, axes=tuple(MeshAxis(name=one.name, ici=one.size) for one in plan.axes))


def _run_alone(table: Table, subject: Subject, plans: Sequence[Plan], place: Path) -> None:
    """Records the losses of all meshes in one process of eight devices."""
    wanted = dict.fromkeys(alone_of(plan) for plan in plans)
    todo = [plan for plan in wanted if str(plan) not in table.alone]
    if not todo:
        return
    with _pool(Surroundings(platforms="cpu", cpu_devices=DEVICES), place) as pool:
        for done, plan in enumerate(todo, start=1):
            job = visit_job(
                subject,
                plan,
                steps=0,
                samples=0,
                loss_steps=RULES.loss_steps,
                warmup_s=0.0,
            )
            answer = visit(Visitors(pool=pool), job, _TIMEOUT_S)
            if isinstance(answer, VisitAnswer):
                table.alone[str(plan)] = answer.losses
                table.save()
            said = "done" if isinstance(answer, VisitAnswer) else failure_reason(answer)
            say(f"one process, {done}/{len(todo)}: {plan}: {said}")


def _visit_first(
    case: Case, table: Table, subject: Subject, plans: Sequence[Plan], pool: Visitors
) -> None:
    """Compiles each plan in the gang, and records its losses and how long a step takes."""
    todo = [plan for plan in plans if str(plan) not in table.rows]
    for done, plan in enumerate(todo, start=1):
        found = calibrate(pool, subject, plan, rules=RULES, clock=time.monotonic)
        if isinstance(found, Calibration):
            table.put(Row(plan=plan, first=found))
            said = f"{np.median(found.first.samples_s) * 1e3:.1f} ms"
        else:
            said = failure_reason(found)
            table.put(Row(plan=plan, failure=said))
        say(f"{case.name}, first visits {done}/{len(todo)}: {plan}: {said}")


def _visit_in_rounds(
    case: Case,
    table: Table,
    subject: Subject,
    plans: Sequence[Plan],
    pool: Visitors,
    *,
    rounds: int,
) -> None:
    """Visits all plans in rounds, those of equal sizes side by side."""
    course = Course(
        pool=pool, subject=subject, rules=RULES, clock=time.monotonic, deadline_s=math.inf
    )
    luck = random.Random(0)
    for number in range(rounds):
        groups = [
            group
            for group in by_sizes([table.rows[str(plan)] for plan in plans]).values()
            if any(len(row.rounds_s) <= number for row in group)
        ]
        luck.shuffle(groups)
        began_s = time.monotonic()
        for done, group in enumerate(groups, start=1):
            entrants = [row.first for row in group if row.first is not None]
            course.visit_s.update({one.plan: one.visit_s for one in entrants})
            for plan, value in course.round_of(entrants).items():
                row = table.rows[str(plan)]
                if isinstance(value, Failure):
                    say(f"{case.name}: {plan} failed: {failure_reason(value)}")
                    table.put(replace(row, failure=failure_reason(value)))
                else:
                    table.put(replace(row, rounds_s=(*row.rounds_s, value)))
            left_s = (time.monotonic() - began_s) / done * (len(groups) - done)
            where = f"{case.name}, round {number + 1}/{rounds}"
            say(f"{where}: {done}/{len(groups)}, {format_wait(left_s)} left")


def by_sizes(rows: Sequence[Row]) -> Mapping[str, Sequence[Row]]:
    """Those that did not fail, by their meshes without what lies over DCN."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if not row.failure:
            found[str(alone_of(row.plan))].append(row)
    return found


# What came of it.
