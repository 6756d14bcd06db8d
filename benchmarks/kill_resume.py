"""Searches killed at random moments by several signals, each resumed by the same command.

A tiny step over `dp` and `tp` on four virtual CPU devices, six plans. At random moments one of
`BLOWS` falls: SIGKILL, SIGTERM or SIGHUP to the search itself, SIGKILL or SIGTERM to a worker,
SIGKILL to a guardian, or SIGKILL to two processes at once. The same command then goes on, until a
search ends by itself and another begins. After every end the study is read from outside. The last
line on stdout is JSON, after SIGTERM of the kills until then; progress goes to stderr.

On a machine that does other work, times of a plan in two processes may differ so much, or so little
be done in the budget, that a search names no winner and ends with 1. The same command goes on then,
as its hint says; a study that comes to no winner after its last kill either is left, and counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import optuna
import psutil
import typer

import automesh
from automesh.errors import AutomeshError
from benchmarks.support.finished_trials import Record, Row, finished_trials
from benchmarks.support.search_process import SearchProcess, end_processes, marked, role

SCRIPT = '''\
"""A regression of one or two layers, sharded over `dp` and `tp`."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def build(mesh, layers=1):
    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    def step(weights, batch):
        def loss_of(weights):
            x = batch
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return [w - 0.01 * g for w, g in zip(weights, grads)], loss

    weights = [struct((64, 64), None, "tp") for _ in range(layers)]
    return jax.jit(step, donate_argnums=0), (weights, struct((32, 64), "dp"))
'''
SPACE = """\
[axes]
dp = {}
tp = {}
[knobs]
layers = [1, 2]
"""
DEVICES = 4
BUDGET = "45s"
KILLS_PER_STUDY = 5  # More would all come near its end: what is done stays done.
PHASES = ("", "enumerate", "estimate", "compile", "measure", "confirm")
ORPHAN_LIMIT_S = 2.0
SIGTERM_EXIT = 128 + signal.SIGTERM  # The search has heard it, and said how to go on.
UNDECIDED_EXIT = 1
GO_ON = (
    "run the same command again to go on",
    "leave the machine to the search and run the same command",
)
UNDECIDED_IN_A_STUDY = 1
STALE_S = 10.0  # To open a study takes a second or two; to wait for the dead would take 30 s.
WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One way to be killed.

    Attributes:
      victims: who gets the signal, all at once: the search, or one worker, the guardian that is its
        parent, the deputy that is the guardian's.
      weight: how often it falls, in proportion to the others.
    """

    victims: tuple[str, ...]
    signal: signal.Signals = signal.SIGKILL
    weight: int

    @property
    def name(self) -> str:
        return f"{' and '.join(self.victims)} {self.signal.name}"


BLOWS = (
    Blow(victims=("search",), weight=5),
    Blow(victims=("search",), signal=signal.SIGTERM, weight=2),
    Blow(victims=("search",), signal=signal.SIGHUP, weight=2),
    Blow(victims=("worker",), weight=2),
    Blow(victims=("worker",), signal=signal.SIGTERM, weight=1),
    Blow(victims=("guardian",), weight=2),
    Blow(victims=("worker", "guardian"), weight=2),
    Blow(victims=("guardian", "deputy"), weight=2),
    Blow(victims=("search", "guardian"), weight=2),
)
AT_THE_START = tuple(blow for blow in BLOWS if blow.victims == ("search",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the searches happen: the same command, another folder for the results of each study."""

    folder: Path
    results: Path
    target: str = f"cpu:{DEVICES}"

    @property
    def rules(self) -> Path:
        return self.results / "mesh_rules.toml"

    @property
    def study(self) -> Path:
        """The folder of the study; `results` itself while there is none."""
        return next(iter(sorted(self.results.glob("train-cpu-*"))), self.results)

    def start(self) -> SearchProcess:
        """Runs the command."""
        options = {
            "--target": self.target,
            "--space": "space.toml",
            "--budget": BUDGET,
            "--top": "6",  # All of them in one race: a finished search has nothing left to do.
            "--results": str(self.results),
            "--rules": str(self.rules),
        }
        pairs = [part for pair in options.items() for part in pair]
        return SearchProcess(["train.py", *pairs, "--json"], self.folder)


@dataclass(slots=True, kw_only=True)
class Report:
    """What the kills did.

    Attributes:
      finished_trials: of all studies.
      lost: finished trials that were gone or changed afterwards.
      repeated: finished trials of a plan beyond the first, per rung.
      orphans: processes that outlived their search, or their guardian, by two seconds.
      torn_files: storages, rule files or tables that could not be read.
      incomplete: searches that ended by themselves without a measured rule in the file.
      unexpected_exits: searches that ended by themselves, neither with 0 nor undecided.
      undecided: searches that ended by themselves and found the times too unsteady, or too few, to
        name a winner.
      left_undecided: studies in which the last search ended so.
      longest_start_s: from the enumeration until the study was open, in a search after a kill.
      first_start_s: the same where there was nothing to resume, the longest.
      longest_survival_s: how long a process outlived its search.
      rerun_new_trials: finished trials that one more run of a finished search added.
      rerun_s: how long such a run took.
    """

    kills: int = 0
    killed: Counter[str] = field(default_factory=Counter[str])
    phases: Counter[str] = field(default_factory=Counter[str])
    studies: int = 0
    starts: int = 0
    finished_trials: int = 0
    lost: int = 0
    repeated: int = 0
    orphans: int = 0
    torn_files: int = 0
    incomplete: int = 0
    unexpected_exits: int = 0
    undecided: int = 0
    left_undecided: int = 0
    longest_start_s: float = 0.0
    first_start_s: float = 0.0
    longest_survival_s: float = 0.0
    rerun_new_trials: int = 0
    rerun_s: float = 0.0
    faults: list[str] = field(default_factory=list[str])


def kill_and_resume(kills: int, *, seed: int, folder: Path, report: Report | None = None) -> Report:
    """Kills searches so many times, and resumes them until the last study is finished.

    Args:
      report: is filled in, and so is there for whoever interrupts this.
    """
    (folder / "train.py").write_text(SCRIPT)
    (folder / "space.toml").write_text(SPACE)
    report, luck = report or Report(), random.Random(seed)
    while report.kills < kills:
        report.studies += 1
        place = Place(folder=folder, results=folder / f"results-{report.studies}")
        until = min(report.kills + KILLS_PER_STUDY, kills)
        StudyOfKills(place=place, report=report, luck=luck, kills=until).run()
    return report


@dataclass(slots=True, kw_only=True)
class StudyOfKills:
    """One study, from its first start until a search in it has ended by itself and done all.

    Attributes:
      kills: no more once there have been so many in all.
      known: finished trials at the end of the last search.
    """

    place: Place
    report: Report
    luck: random.Random
    kills: int
    known: dict[Row, Record] = field(default_factory=dict[Row, Record])

    def run(self) -> None:
        undecided = 0
        while True:
            first = not self.place.results.exists()
            with self._started() as search:
                self.report.starts += 1
                code = self._live(search)
            self._note_start(search, first=first)
            self._check_processes(search)
            self.check_study()
            if code is None:
                continue
            if code == UNDECIDED_EXIT and is_undecided(search):
                self.report.undecided += 1
                self._say("undecided")
                undecided += self.report.kills >= self.kills
                if undecided <= UNDECIDED_IN_A_STUDY:
                    continue
                self.report.left_undecided += 1
                return
            if code != 0:
                self.report.unexpected_exits += 1
                self._fault(f"exit code {code}: {search.words[-500:]}")
            elif search.result()["funnel"]["waiting"]:
                continue  # The budget went to the kills of its workers: once more.
            self._check_finished()
            return

    @contextlib.contextmanager
    def _started(self) -> Generator[SearchProcess]:
        search = self.place.start()
        try:
            yield search
        except BaseException:  # An interruption: nothing writes where all is removed.
            end_processes(marked(search.mark))
            raise

    def _live(self, search: SearchProcess) -> int | None:
        """Kills until the search is dead or at its end: its exit code, None if it was killed."""
        while self.report.kills < self.kills:
            phase = self.luck.choice(PHASES)
            if phase and not search.wait_for(phase, WAIT_S):
                break
            end_s = time.monotonic() + self.luck.uniform(0.0, 4.0)
            while time.monotonic() < end_s and not search.has_ended:
                time.sleep(0.01)
            # Without the inspection there is nothing that could go on after a kill of a worker.
            blows = BLOWS if search.said_at_s("compile") is not None else AT_THE_START
            (blow,) = self.luck.choices(blows, [one.weight for one in blows])
            if search.has_ended:
                break
            if self._strike(search, blow):
                return self._end_of_killed(search, blow)
        return search.finish(WAIT_S)

    def _strike(self, search: SearchProcess, blow: Blow) -> bool:
        """Sends the signals; True if the search itself got one.

        Nothing happens, and nothing is counted, while there is no worker to be struck.
        """
        struck = {"search": psutil.Process(search.pid)} if "search" in blow.victims else {}
        if set(blow.victims) - {"search"}:
            family = self._family(search)
            if family is None:
                return False
            struck |= {victim: family[victim] for victim in blow.victims if victim != "search"}
        below = self._below(struck)
        for process in struck.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(blow.signal)
        self.report.kills += 1
        self.report.killed[blow.name] += 1
        last = search.said[-1][1] if search.said else "start"
        self.report.phases[last.split()[0]] += 1
        self._say(f"kill {self.report.kills}: {blow.name}, after: {last[:60]}")
        if "search" in struck:
            return True
        _, left = psutil.wait_procs(below, timeout=ORPHAN_LIMIT_S)
        left = [one for one in left if one.is_running() and one.status() != "zombie"]
        self.report.orphans += len(left)
        if left:
            self._fault(f"left after {blow.name}: {left}")
        return False

    def _family(self, search: SearchProcess) -> dict[str, psutil.Process] | None:
        """A worker with its guardian and deputy; None while there is no whole one."""
        for worker in self.luck.sample(helpers := search.helpers(), len(helpers)):
            if role(worker) != "worker":
                continue
            with contextlib.suppress(psutil.Error):
                guardian = worker.parent()
                deputy = guardian.parent() if guardian else None
                if guardian and deputy and {role(guardian), role(deputy)} == {"guardian"}:
                    return {"worker": worker, "guardian": guardian, "deputy": deputy}
        return None

    def _below(self, struck: dict[str, psutil.Process]) -> list[psutil.Process]:
        found: set[psutil.Process] = set()
        for victim, process in struck.items():
            if victim != "search":
                with contextlib.suppress(psutil.NoSuchProcess):
                    found |= {process, *process.children(recursive=True)}
        return list(found)

    def _end_of_killed(self, search: SearchProcess, blow: Blow) -> int | None:
        """Waits for the end: None if the signal was the reason, else the exit code."""
        code = search.finish(WAIT_S)
        heard = blow.signal == signal.SIGTERM and code == SIGTERM_EXIT
        return None if heard or code == -blow.signal else code

    def _note_start(self, search: SearchProcess, *, first: bool) -> None:
        counted_s, opened_s = search.said_at_s("enumerate"), search.said_at_s("compile")
        if counted_s is None or opened_s is None:
            return
        start_s = opened_s - counted_s
        if first:
            self.report.first_start_s = max(self.report.first_start_s, start_s)
        else:
            self.report.longest_start_s = max(self.report.longest_start_s, start_s)

    def _check_processes(self, search: SearchProcess) -> None:
        left, survival_s = search.survivors(ORPHAN_LIMIT_S)
        self.report.longest_survival_s = max(self.report.longest_survival_s, survival_s)
        self.report.orphans += len(left)
        if left:
            self._fault(f"outlived its search: {[(one.pid, one.cmdline()) for one in left]}")
            end_processes(left)

    def check_study(self) -> None:
        """Nothing is torn, lost or repeated since the last look."""
        found = self._read_study()
        for row, record in self.known.items():
            if found.get(row) != record:
                self.report.lost += 1
                self._fault(f"{row} was {record}, is {found.get(row)}")
        keys = Counter((rung, record.key) for (rung, _), record in found.items())
        again = sum(count - 1 for count in keys.values())
        if again:
            self._fault(f"finished twice: {[key for key, count in keys.items() if count > 1]}")
        self.report.repeated += again
        self.report.finished_trials += len(found) - len(self.known)
        self.known = found
        self._check_files()

    def _read_study(self) -> dict[Row, Record]:
        """All finished trials, from a copy: the next search must itself mend what the kill left."""
        original = self.place.study / "study.db"
        if not original.exists():
            return {}
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "study.db"
            for suffix in ("", "-wal"):
                if (part := original.with_name(original.name + suffix)).exists():
                    shutil.copy(part, copy.with_name(copy.name + suffix))
            try:
                with contextlib.closing(sqlite3.connect(copy)) as database:
                    (verdict,) = database.execute("PRAGMA integrity_check").fetchone()
                    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master")}
                if verdict != "ok":
                    raise sqlite3.DatabaseError(verdict)
                return finished_trials(copy) if "trials" in tables else {}
            except (sqlite3.Error, optuna.exceptions.OptunaError) as error:
                self.report.torn_files += 1
                self._fault(f"{original}: {error}")
                return self.known

    def _check_files(self) -> None:
        table = self.place.study / "trials.csv"
        try:
            if self.place.rules.exists():
                automesh.load(self.place.rules).select(
                    self.place.target.replace(":", "-").replace("*", "-")
                )
            if table.exists():
                lines = table.read_text().splitlines()
                # A search that ended before its first outcome leaves the heading alone.
                assert lines and table.read_text().endswith("\n"), lines
        except (AutomeshError, AssertionError) as error:
            self.report.torn_files += 1
            self._fault(f"torn: {error}")

    def _check_finished(self) -> None:
        """The rule is there and measured; the same command again is quick and adds nothing."""
        if not self.has_measured_rule():
            self.report.incomplete += 1
            self._fault(f"no measured rule in {self.place.rules}")
        before, rules = len(self.known), self.place.rules
        rule = rules.read_bytes() if rules.exists() else b""
        began_s = time.monotonic()
        with self._started() as search:
            code = search.finish(WAIT_S)
        self.report.rerun_s = max(self.report.rerun_s, time.monotonic() - began_s)
        self._check_processes(search)
        self.check_study()
        self.report.rerun_new_trials += len(self.known) - before
        is_open = code == UNDECIDED_EXIT and is_undecided(search)
        self.report.undecided += is_open
        if (code != 0 and not is_open) or not self.has_measured_rule():
            self.report.unexpected_exits += 1
            self._fault(f"one more run: {code}, rule was {rule!r}; {search.words[-500:]}")
        self._say(f"study {self.report.studies} finished, {before} trials")

    def has_measured_rule(self) -> bool:
        text = self.place.rules.read_text() if self.place.rules.exists() else ""
        return 'kind = "measured"' in text

    def _fault(self, text: str) -> None:
        self.report.faults.append(text)
        self._say(f"FAULT: {text}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def is_undecided(search: SearchProcess) -> bool:
    """Whether a search has said at its end that the same command goes on: its budget was too short,
    or the times too unsteady, on a machine with other work."""
    said = [line.removeprefix("hint: ") for _, line in search.said if line.startswith("hint: ")]
    return bool(said) and said[-1].startswith(GO_ON)


def summary_of(report: Report, seconds: float) -> dict[str, Any]:
    """The figures, rounded; the faults in words only as their number."""
    figures = {one.name: getattr(report, one.name) for one in dataclasses.fields(report)}
    figures |= {"seconds": seconds, "faults": len(report.faults)}
    return {
        name: round(value, 2) if isinstance(value, float) else value
        for name, value in figures.items()
    }


def main(
    kills: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    seed: Annotated[int, typer.Option(help="Of moments and victims.")] = 0,
) -> None:
    """Kills searches at random moments, resumes them, and counts what was lost or left behind."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began_s, report = time.monotonic(), Report()
    with (
        tempfile.TemporaryDirectory(prefix="automesh-kill-") as folder,
        contextlib.suppress(KeyboardInterrupt),
    ):
        kill_and_resume(kills, seed=seed, folder=Path(folder), report=report)
    print(json.dumps(summary_of(report, time.monotonic() - began_s)))
    if report.faults:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
