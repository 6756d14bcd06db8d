"""One study whose searches, agents and ranks are killed, until the same command has done it all."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import kill_resume
from benchmarks.kill_fleet.blows import LIMIT_S, Blow, Kill, Launch, StudyRow, kind_of, stand_of
from benchmarks.kill_fleet.clusters import Cluster
from benchmarks.kill_resume import Place, StudyOfKills
from benchmarks.support.search_process import MARK, SearchProcess, end_processes

SPACE = """\
batch_axes = ["dp"]
[axes]
dp = { dcn = true }
tp = {}
[knobs]
layers = [1, 2]
"""
TARGET = "cpu:4*2"
# Exit codes of searches that are started once more: whose budget has gone to the kills, and that
# somebody else on this machine has interrupted.
UNFINISHED = (1, 128 + signal.SIGTERM)
WAIT_S = 600.0  # For a phase, or the end: this says that something hangs.
LATEST_S = 3.0  # Into a phase, when it is struck.
MOST_STARTS = 8  # Without any kill: a budget that others ate may end a few.
_LOOK_S = 0.2
# Who does not belong to a search by now never will; to look again and again would take a core.
_GROWN_UP_S = 10.0
_STRANGERS: set[tuple[str, int, float]] = set()
_STAGE_OF = {"confirm": "measure"}  # In fresh gangs, which is where most of its time goes.
_SIGNS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlace(Place):
    """Where the searches of a study happen, and on which hosts.

    Attributes:
      cluster: see `benchmarks.kill_fleet.clusters`.
      budget: of each start, as the search takes it.
    """

    cluster: Cluster
    budget: str = "3m"
    target: str = TARGET

    def start(self) -> SearchProcess:
        """Runs the command."""
        options = {
            "--target": self.target,
            "--space": "space.toml",
            "--budget": self.budget,
            "--top": "2",
            "--results": str(self.results),
            "--rules": str(self.rules),
        }
        pairs = [part for pair in options.items() for part in pair]
        words = ["train.py", *pairs, "--json", *self.cluster.options]
        return SearchProcess(words, self.folder, self.cluster.variables)


@dataclass(slots=True, kw_only=True)
class KilledStudy:
    """One study.

    Attributes:
      blows: what is to befall it, in this order; what comes too late is left out.
      kills: what has befallen it.
    """

    place: FleetPlace
    launch: Launch
    blows: Sequence[Blow]
    luck: random.Random
    say: Callable[[str], object]
    kills: list[Kill] = field(default_factory=list[Kill])
    _left: list[Blow] = field(init=False, default_factory=list[Blow])
    _faults: list[str] = field(init=False, default_factory=list[str])
    _orphans: int = field(init=False, default=0)
    _starts: int = field(init=False, default=0)
    _watched: StudyOfKills = field(init=False)

    def __post_init__(self) -> None:
        self._left = list(self.blows)
        self._watched = StudyOfKills(
            place=self.place, report=kill_resume.Report(), luck=self.luck, kills=0
        )

    def run(self) -> StudyRow:
        """Starts the command until it has ended by itself with a rule."""
        began_s, quiet_starts = time.monotonic(), 0
        (self.place.folder / "train.py").write_text(kill_resume.SCRIPT)
        (self.place.folder / "space.toml").write_text(SPACE)
        while quiet_starts < MOST_STARTS:
            before = len(self.kills)
            search = self.place.start()
            self._starts += 1
            try:
                is_killed = self._live(search)
            except BaseException:
                search.kill()
                raise
            self._look_for_orphans(search)
            self._watched.check_study()
            quiet_starts += len(self.kills) == before
            if not is_killed and self._is_done(search):
                break
        else:
            self._fault(f"{MOST_STARTS} starts without a kill did not end the study")
        report = self._watched.report
        has_rule = self._watched.has_measured_rule()
        if not has_rule:
            self._fault("there is no measured rule at the end")
        return StudyRow(
            launch=self.launch,
            kills=tuple(self.kills),
            starts=self._starts,
            finished=report.finished_trials,
            failed=sum(record.state == "FAIL" for record in self._watched.known.values()),
            lost=report.lost,
            repeated=report.repeated,
            torn=report.torn_files,
            orphans=self._orphans,
            has_rule=has_rule,
            seconds=round(time.monotonic() - began_s, 1),
            faults=(*self._faults, *report.faults),
        )

    def _is_done(self, search: SearchProcess) -> bool:
        """Whether a search that has ended by itself has found something; an end that nobody
        expects is a fault, and the end of the study, too."""
        code = search.finish(WAIT_S)
        if code not in (0, *UNFINISHED):
            self._fault(f"exit code {code}: {search.words[-500:]}")
        return code not in UNFINISHED

    def _live(self, search: SearchProcess) -> bool:
        """Lets blows fall on a search until it ends; True if one of them has ended it."""
        while self._left:
            blow = self._left[0]
            if not self._is_at(search, blow):
                self._left.pop(0)  # It came too late: another study will have it.
                if search.has_ended:
                    break
                continue
            kill = self._strike(search, blow)
            if kill is None:
                continue
            self._left.pop(0)
            self.kills.append(kill)
            for fault in kill.faults:
                self._fault(fault)
            self.say(
                f"{kill.blow}: waited {kill.waited_s:.1f} s, went on after {kill.went_on_s:.1f} s, "
                f"at: {kill.doing[:60]}"
            )
            if search.has_ended:
                return blow.victim == "search" and search.finish(WAIT_S) < 0
        try:
            search.finish(WAIT_S)
        except subprocess.TimeoutExpired:
            self._fault(f"it has not ended within {WAIT_S:.0f} s: {search.words[-500:]}")
            return True
        return False

    def _is_at(self, search: SearchProcess, blow: Blow) -> bool:
        """Waits until the search is at the stage of a blow, and a moment longer; False if it is
        past it, or has ended."""
        end_s = time.monotonic() + WAIT_S
        while time.monotonic() < end_s and not search.has_ended:
            if self._stage(search) == blow.stage and _of_kind(search, self.place.folder, "rank"):
                time.sleep(self.luck.uniform(0.0, LATEST_S))
                return not search.has_ended and self._stage(search) == blow.stage
            if blow.stage == "compile" and self._stage(search) == "measure":
                return False
            time.sleep(_LOOK_S)
        return False

    def _stage(self, search: SearchProcess) -> str:
        """The phase that it is in by what it has said last; empty if that was its end."""
        for _, line in reversed(search.said):
            if (stand := stand_of(line)) is not None:
                name, done, total = stand
                return _STAGE_OF.get(name, name) if done < total else ""
        return ""

    # One blow.

    def _strike(self, search: SearchProcess, blow: Blow) -> Kill | None:
        """Lets a blow fall, and looks what becomes of it; None if there is nobody to be struck."""
        doing = search.said[-1][1] if search.said else ""
        if blow.victim == "search":
            waited_s, went_on_s, left = self._strike_search(search, blow)
        else:
            struck = self._victims(search, blow)
            if not struck:
                time.sleep(_LOOK_S)
                return None
            waited_s, went_on_s, left = self._strike_others(search, blow, struck)
        if left:
            self.say(f"left after {blow.name}: {[_words(one) for one in left]}")
            end_processes(left)
        return Kill(
            blow=blow.name,
            stated_s=blow.stated_s,
            waited_s=round(waited_s, 2),
            went_on_s=round(went_on_s, 2),
            orphans=len(left),
            doing=doing,
        )

    def _victims(self, search: SearchProcess, blow: Blow) -> list[psutil.Process]:
        """Who is struck, or is on what is struck: agents."""
        kind = "rank" if blow.victim == "rank" else "agent"
        found = _of_kind(search, self.place.folder, kind)
        if blow.victim in ("rank", "agent"):
            return [self.luck.choice(found)] if found else []
        return found

    def _strike_others(
        self, search: SearchProcess, blow: Blow, struck: list[psutil.Process]
    ) -> tuple[float, float, list[psutil.Process]]:
        kind = "rank" if blow.victim == "rank" else "agent"
        there = {one.pid for one in _of_kind(search, self.place.folder, kind)}
        below = _with_descendants(struck)
        said = self._said_of_work(search)
        began_s = time.monotonic()
        if blow.victim in ("rank", "agent"):
            for one in struck:
                with contextlib.suppress(psutil.Error):
                    one.send_signal(_SIGNS[blow.sign])
        else:
            self.place.cluster.strike(blow.victim, blow.sign)
        limit_s = blow.stated_s + LIMIT_S

        def is_replaced() -> bool:
            now = {one.pid for one in _of_kind(search, self.place.folder, kind)}
            lost = [one for one in struck if _is_gone(one)]
            return search.has_ended or bool(lost and now - there)

        waited_s = _until(is_replaced, began_s, WAIT_S)
        # Of a node that is lost its own processes end; those of the others are no orphans.
        doomed = below if blow.victim in ("rank", "agent") else []
        _until(lambda: all(map(_is_gone, doomed)), began_s, max(limit_s, waited_s + 2.0))
        left = [one for one in doomed if not _is_gone(one)]
        return waited_s, self._went_on_s(search, said, began_s), left

    def _went_on_s(
        self, search: SearchProcess, said: list[tuple[str, int, int]], began_s: float
    ) -> float:
        """Waits until it has said more, or ended; -1 if it does not."""
        limit_s = time.monotonic() - began_s + WAIT_S
        took_s = _until(
            lambda: search.has_ended or self._said_of_work(search) != said, began_s, limit_s
        )
        return took_s if took_s < limit_s else -1.0

    def _said_of_work(self, search: SearchProcess) -> list[tuple[str, int, int]]:
        """All that it has said of how far it is, each once: more of it is more work."""
        found = dict.fromkeys(stand_of(line) for _, line in list(search.said))
        return [one for one in found if one is not None]

    def _strike_search(
        self, search: SearchProcess, blow: Blow
    ) -> tuple[float, float, list[psutil.Process]]:
        limit_s = blow.stated_s + LIMIT_S
        began_s = time.monotonic()
        if blow.sign == "KILL":
            search.kill()
            waited_s = _until(lambda: not self._family(search), began_s, limit_s)
            return waited_s, 0.0, self._family(search)
        said = self._said_of_work(search)
        suspended = psutil.Process(search.pid)
        suspended.suspend()

        def others() -> list[psutil.Process]:
            return [
                one
                for kind in ("agent", "rank")
                for one in _of_kind(search, self.place.folder, kind)
            ]

        waited_s = _until(lambda: not others(), began_s, limit_s)
        left = others()
        if self.luck.random() < 0.5:
            search.kill()
            _until(lambda: not self._family(search), time.monotonic(), LIMIT_S)
            return waited_s, 0.0, [*left, *self._family(search)]
        suspended.resume()
        return waited_s, self._went_on_s(search, said, time.monotonic()), left

    # Who is there.

    def _family(self, search: SearchProcess) -> list[psutil.Process]:
        return [one for one in _processes(search, self.place.folder) if one.pid != search.pid]

    def _look_for_orphans(self, search: SearchProcess) -> None:
        """After the end of a search, however it came."""
        _until(lambda: not self._family(search), time.monotonic(), LIMIT_S)
        left = self._family(search)
        self._orphans += len(left)
        if left:
            self._fault(f"outlived its search: {[_words(one) for one in left]}")
            end_processes(left)

    def _fault(self, text: str) -> None:
        self._faults.append(text)
        self.say(f"FAULT: {text}")


def _processes(search: SearchProcess, folder: Path) -> list[psutil.Process]:
    """All that belong to a search: by its mark, or, under Ray, by the folder that they work in."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            one = (search.mark, process.pid, process.create_time())
            if one in _STRANGERS or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == search.mark or process.cwd() == str(folder):
                found.append(process)
            elif time.time() - process.create_time() > _GROWN_UP_S:
                _STRANGERS.add(one)
    return found


def _of_kind(search: SearchProcess, folder: Path, kind: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in _processes(search, folder):
        with contextlib.suppress(psutil.Error):
            if kind_of(process.cmdline(), process.environ()) == kind:
                found.append(process)
    return found


def _with_descendants(struck: Sequence[psutil.Process]) -> list[psutil.Process]:
    found: set[psutil.Process] = set()
    for process in struck:
        with contextlib.suppress(psutil.Error):
            found |= {process, *process.children(recursive=True)}
    return list(found)


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _words(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)


def _until(is_so: Callable[[], bool], began_s: float, limit_s: float) -> float:
    """Waits until something is so; the seconds since `began_s`, which may be the limit."""
    while not is_so():
        if time.monotonic() - began_s >= limit_s:
            return limit_s
        time.sleep(_LOOK_S)
    return time.monotonic() - began_s


def say(text: str) -> None:
    """Progress, for who looks on."""
    print(text, file=sys.stderr, flush=True)
