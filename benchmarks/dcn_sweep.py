"""What does an axis over DCN cost, and are the losses of two processes those of one?

    python -m benchmarks.dcn_sweep [--case dense_lm moe_lm pipeline] [--rounds 8] [--search]

Two agents on this machine, each with a process of four virtual CPU devices, are a gang with DCN
between them (`cpu:4*2`): inside a process devices exchange data through its memory, between the two
over TCP. Measured is every legal split of dp, fsdp and tp for `examples/dense_lm.py`, with each of
the three over DCN; dp, ep and tp for `moe_lm.py`, with dp or ep over DCN; and a pipeline of two
stages of `dense_lm.py`, with pp or dp over DCN. The first losses of each plan are compared with
those of the same mesh in one process of eight devices. Meshes of equal sizes, which differ only in
what lies over DCN, are visited side by side as a race does it; their ratios have 95 % intervals
over the rounds. `--search` runs `automesh search examples/dense_lm.py --target 'cpu:4*2'` as well.

Everything is kept in `--folder`: the same command goes on where it was. Progress goes to stderr;
the last line on stdout is one JSON object. The exit code is 1 if a plan failed or has other losses,
an axis was never over DCN, tp over DCN was not shown to be slower than inside, or the search gave
no measured rule.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from automesh import api
from automesh.errors import AutomeshError
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
from automesh.tuner.measure.statistics import median_interval, paired_ratio
from automesh.tuner.preparation import Preparation
from automesh.tuner.session import open_session
from automesh.tuner.workers import memory_share_bytes, surroundings_of
from automesh.units import format_wait
from automesh.worker.messages import Surroundings
from automesh.worker.pool import Pool
from automesh.worker.process import Process, StartWorker
from benchmarks.support.compiles import say
from benchmarks.support.paths import EXAMPLES, ROOT
from benchmarks.support.search_process import SearchProcess
from benchmarks.support.visitors import Visitors

TARGET, DEVICES = "cpu:4*2", 8
TOLERANCE = 1e-5
"""Largest relative difference of losses in float32."""
_SCHEMA = 1
_TIMEOUT_S = 600.0
_SEARCH_S = 1800.0
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
                say(f"{path} is of another script, space or version: starting anew")
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


def sweep(case: Case, folder: Path, *, rounds: int, meshes: Sequence[str] = ()) -> Table:
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
    request = api.read_request(str(EXAMPLES / case.script), options, targets=[TARGET])
    target = parse_target(TARGET, os.environ)
    with workers_of(request, target, _Said()) as start_gang:
        with open_session(
            request, target, read_space(str(space)), _Said(), start_worker=start_gang
        ) as session:
            preparation = session.preparation
        table = Table.open(folder / f"{case.name}.json", _header(case, preparation))
        legal = preparation.enumeration.legal
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


def _header(case: Case, preparation: Preparation) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "script": case.script,
        "space": case.space,
        "source_hash": preparation.source_hash,
        "versions": [list(pair) for pair in preparation.inspection.versions],
        "rules": asdict(RULES),
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


def over_dcn(plan: Plan) -> tuple[str, ...]:
    """The axes of a plan that lie over DCN."""
    return tuple(axis.name for axis in plan.axes if axis.dcn > 1)


def difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest relative difference; infinite if one is no number, or they are not as many.

    >>> difference((2.0, 4.0), (2.0, 4.4)), difference((2.0,), ())
    (0.1, inf)
    """
    if not losses or len(losses) != len(others) or not np.isfinite([*losses, *others]).all():
        return math.inf
    return round(
        max(abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(losses, others, strict=True)),
        12,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """A mesh with an axis over DCN against one of equal sizes with that axis inside.

    Attributes:
      ratio: how many times as long a step of the former takes.
      low, high: 95 % interval.
    """

    over: str
    inside: str
    ratio: float
    low: float
    high: float


def prices(rows: Sequence[Row], axis: str) -> list[Price]:
    """What an axis costs over DCN, for every two plans that differ in nothing else."""
    found: list[Price] = []
    for group in by_sizes(rows).values():
        timed = [row for row in group if row.rounds_s]
        for over in (row for row in timed if axis in over_dcn(row.plan)):
            for inside in timed:
                if axis in over_dcn(inside.plan) or inside.plan.sizes[axis] == 1:
                    continue
                ratio = paired_ratio(over.rounds_s, inside.rounds_s)
                found.append(
                    Price(
                        over=over.plan.mesh,
                        inside=inside.plan.mesh,
                        ratio=ratio.value,
                        low=ratio.low,
                        high=ratio.high,
                    )
                )
    return found


def noise(rows: Sequence[Row]) -> float:
    """How far rounds of one plan are from each other: the standard deviation of their logarithms,
    in the median of all plans; 0 if no plan has two."""
    spreads = [np.std(np.log(row.rounds_s), ddof=1) for row in rows if len(row.rounds_s) > 1]
    return float(np.median(spreads)) if spreads else 0.0


def summary(case: Case, table: Table, *, is_whole: bool = True) -> tuple[dict[str, Any], list[str]]:
    """The figures of a case, and what is not as it should be, in words.

    Args:
      is_whole: all plans were wanted.
    """
    rows = list(table.rows.values())
    faults = [f"{row.plan} failed: {row.failure}" for row in rows if row.failure]
    splits = Counter(name for row in rows if row.rounds_s for name in over_dcn(row.plan))
    if is_whole:
        faults += [f"{name} was never measured over DCN" for name in case.over if not splits[name]]
    apart: dict[str, float] = {}
    for row in rows:
        if row.first is None:
            continue
        losses = table.alone.get(str(alone_of(row.plan)), ())
        apart[str(row.plan)] = far = difference(row.first.first.losses, losses)
        if far > TOLERANCE:
            faults.append(f"the losses of {row.plan} are {far:.1e} from those of one process")
        if row.first.first.loss_dtype != "float32":
            faults.append(f"{row.plan} computes in {row.first.first.loss_dtype}, not in float32")
    paid = prices(rows, case.asked)
    if case.is_slower:
        faults += [
            f"{one.over} was not shown to be slower than {one.inside}: {one.ratio:.2f} "
            f"({one.low:.2f} to {one.high:.2f})"
            for one in paid
            if one.low <= 1.0
        ]
    ratios = [one.ratio for one in paid]
    figures = {
        "plans": len(rows),
        "over_dcn": dict(sorted(splits.items())),
        "failed": sum(bool(row.failure) for row in rows),
        "losses_equal": sum(far <= TOLERANCE for far in apart.values()),
        "largest_loss_difference": _finite(max(apart.values(), default=math.inf), places=12),
        "noise_of_a_round": round(noise(rows), 4),
        "rounds": min((len(row.rounds_s) for row in rows if not row.failure), default=0),
        "asked": case.asked,
        "pairs": len(paid),
        "slower": sum(one.low > 1.0 for one in paid),
        "faster": sum(one.high < 1.0 for one in paid),
        "ratio_min": round(min(ratios), 3) if ratios else None,
        "ratio_median": round(float(np.median(ratios)), 3) if ratios else None,
        "ratio_max": round(max(ratios), 3) if ratios else None,
        "ratios": [
            {name: _finite(value) if isinstance(value, float) else value for name, value in pair}
            for pair in (asdict(one).items() for one in paid)
        ],
        "step_ms": {
            str(row.plan): [_finite(one * 1e3) for one in _middle(row)]
            for row in sorted(rows, key=lambda row: _middle(row)[0])
            if row.rounds_s
        },
        "steps_of_losses": RULES.loss_steps,
    }
    return figures, faults


def _middle(row: Row) -> tuple[float, float, float]:
    """Median of the rounds, and its 95 % interval; infinite without rounds."""
    if not row.rounds_s:
        return math.inf, math.inf, math.inf
    return (float(np.median(row.rounds_s)), *median_interval(row.rounds_s))


def _finite(value: float, *, places: int = 3) -> float | None:
    """Rounded; None for what JSON has no number for."""
    return round(value, places) if math.isfinite(value) else None


# The command itself.


def search(folder: Path, budget: str) -> tuple[dict[str, Any], list[str]]:
    """Runs the search of the same target by its command; its figures, and what is wrong."""
    place = (folder / "search").absolute()
    place.mkdir(parents=True, exist_ok=True)
    rules = place / "mesh_rules.toml"
    rules.unlink(missing_ok=True)
    words = ["examples/dense_lm.py", "--target", TARGET, "--budget", budget, "--new", "--json"]
    say(" ".join(["automesh search", *words]))
    process = SearchProcess([*words, "--results", str(place), "--rules", str(rules)], ROOT)
    code = process.finish(_SEARCH_S)
    wall_s = time.monotonic() - process.began_s
    found: dict[str, Any] = tomllib.loads(rules.read_text()) if rules.exists() else {}
    rule: dict[str, Any] = next(iter(found.get("rule", ())), {})
    evidence = rule.get("evidence", {})
    figures = {
        "exit_code": code,
        "wall_s": round(wall_s, 1),
        "rule": {name: value for name, value in rule.items() if name != "evidence"},
        "evidence": evidence.get("kind"),
    }
    faults = [] if code == 0 else [f"the search ended with {code}: {process.words[-1000:]}"]
    if evidence.get("kind") != "measured":
        faults.append("the search gave no measured rule")
    return figures, faults


def main(arguments: list[str]) -> int:
    """Sweeps the cases, and prints their figures; 1 if something is not as it should be."""
    about = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about[0],
        epilog=about[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [case.name for case in CASES]
    parser.add_argument("--case", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument(
        "--mesh", nargs="+", default=(), help="only these meshes, as `dcn.tp:2,dp:4`; default: all"
    )
    parser.add_argument("--rounds", type=int, default=8, help="visits to each plan (default: 8)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("results/dcn_sweep"),
        help="for records and logs (default: results/dcn_sweep)",
    )
    parser.add_argument("--search", action="store_true", help="run `automesh search`, too")
    parser.add_argument("--budget", default="5m", help="of that search (default: 5m)")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error("--rounds: at least one round is needed")
    folder, began_s = given.folder.absolute(), time.monotonic()
    found, faults = dict[str, Any](), list[str]()
    for case in CASES:
        if case.name not in given.case:
            continue
        try:
            table = sweep(case, folder, rounds=given.rounds, meshes=given.mesh)
        except AutomeshError as error:  # The other cases may come to something.
            faults.append(f"{case.name}: {error}")
            continue
        found[case.name], wrong = summary(case, table, is_whole=not given.mesh)
        faults += [f"{case.name}: {text}" for text in wrong]
        say(json.dumps({case.name: found[case.name]}, indent=1))
    if given.search:
        found["search"], wrong = search(folder, given.budget)
        faults += wrong
        say(json.dumps({"search": found["search"]}, indent=1))
    for text in faults:
        say(f"FAULT: {text}")
    seconds = round(time.monotonic() - began_s, 1)
    print(json.dumps({"target": TARGET, **found, "faults": len(faults), "seconds": seconds}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
