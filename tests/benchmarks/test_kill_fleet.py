"""Which blows fall, what is counted of them, and what is called a fault."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.kill_fleet import command, study
from benchmarks.kill_fleet.blows import (
    LIMIT_S,
    Blow,
    Kill,
    StudyRow,
    blows,
    kind_of,
    line_of,
    next_study,
    row_of,
    stand_of,
    summary,
    without,
)
from benchmarks.kill_fleet.clusters import Local
from benchmarks.kill_fleet.study import FleetPlace, KilledStudy
from benchmarks.support.search_process import MARK

KILL = Kill(
    blow="local agent STOP measure",
    stated_s=20.0,
    waited_s=21.0,
    went_on_s=30.0,
    orphans=0,
    doing="measure 1/6",
)
ROW = StudyRow(
    launch="local",
    kills=(KILL,),
    starts=1,
    finished=12,
    failed=0,
    lost=0,
    repeated=0,
    torn=0,
    orphans=0,
    has_rule=True,
    seconds=60.0,
    faults=(),
)


def test_sixty_kills_are_five_of_each_kind_here() -> None:
    found = Counter(blow.name for blow in blows(60, ["local"], seed=3))
    assert len(found) == 12
    assert set(found.values()) == {5}
    everywhere = Counter(blow.victim for blow in blows(60, ["local", "ray", "slurm"], seed=3))
    assert everywhere.keys() == {"rank", "agent", "search", "node", "step"}


def test_what_an_earlier_run_has_done_is_not_done_again() -> None:
    wanted = blows(12, ["local"], seed=0)
    left = without(wanted, [ROW])
    assert len(left) == 11
    assert KILL.blow not in {blow.name for blow in left}
    assert without(wanted, [replace(ROW, kills=())]) == wanted
    assert without(wanted[:1], [replace(ROW, kills=())] * 2) == wanted[:1]


def test_a_study_has_blows_of_both_stages_the_compiles_first() -> None:
    wanted = blows(36, ["local", "slurm"], seed=1)
    chosen = next_study(wanted, 6)
    assert [blow.stage for blow in chosen] == ["compile"] * 3 + ["measure"] * 3
    assert {blow.launch for blow in chosen} == {wanted[0].launch}
    rest = [blow for blow in blows(12, ["local"], seed=1) if blow.stage == "measure"]
    assert next_study(rest, 4) == rest[:4]


@pytest.mark.parametrize(
    ("line", "stand"),
    [
        ("compile 3/6, 1 failed, about 2 s left", ("compile", 3, 6)),
        ("measure 0/6", ("measure", 0, 6)),
        ("... dp:8, compiling, rank 1 of 2, compile 1/6, 12 s elapsed", ("compile", 1, 6)),
        ("note: the agent on local-2 was lost: silent for 20 s", None),
        ("worker log: /tmp/results/1/2", None),
    ],
)
def test_where_a_search_is_stands_in_its_lines(line: str, stand: object) -> None:
    assert stand_of(line) == stand


def test_who_is_who() -> None:
    worker = ["python", "-P", "-m", "automesh.worker.child", "7", "100", "handler"]
    agent = ["python", "-P", "-m", "automesh", "agent", "127.0.0.1:1", "--name", "local-1"]
    gang = {"AUTOMESH_GANG": "0/2@127.0.0.1:2"}
    assert kind_of(worker, gang) == "rank"
    assert kind_of(worker, {}) == "other"
    assert kind_of(agent, {}) == "agent"
    for command_ in (worker, agent):
        assert kind_of(["python", "/x/guardian.py", "1", *command_], gang) == "guardian"
    assert kind_of(["python", "-m", "automesh", "search", "agent"], {}) == "other"


def test_what_is_allowed_is_twenty_seconds_beyond_what_is_stated() -> None:
    stated = {blow.name: blow.stated_s for blow in blows(36, ["local", "ray", "slurm"], seed=0)}
    assert stated["local rank KILL measure"] == stated["slurm step KILL compile"] == 0.0
    assert stated["local rank STOP compile"] == 8.0
    assert stated["local agent STOP compile"] == stated["local search STOP measure"] == 20.0
    assert KILL.faults == ()
    assert replace(KILL, waited_s=KILL.stated_s + LIMIT_S).faults == ()
    slow = replace(KILL, waited_s=40.1)
    assert slow.faults == ("local agent STOP measure: 40.1 s, and 40 are allowed",)
    bad = replace(KILL, went_on_s=-1.0, orphans=2)
    assert bad.faults == (
        "local agent STOP measure: the search did nothing more",
        "local agent STOP measure: 2 processes were left",
    )


def test_the_figures_are_those_of_all_studies() -> None:
    other = replace(KILL, blow="local rank KILL compile", stated_s=0.0, waited_s=2.5, orphans=1)
    bad = replace(ROW, kills=(other,), lost=1, has_rule=False, orphans=2, faults=("a", "b"))
    found = summary([ROW, bad], missing={"ray": "Ray is not installed here"})
    assert (found["kills"], found["studies"], found["finished_trials"]) == (2, 2, 24)
    assert (found["lost"], found["orphans"], found["without_rule"], found["faults"]) == (1, 3, 1, 2)
    assert found["longest_beyond_stated_s"] == 2.5
    assert found["by_blow"]["local agent STOP measure"] == {
        "kills": 1,
        "longest_wait_s": 21.0,
        "allowed_s": 40.0,
        "longest_until_it_went_on_s": 30.0,
    }
    assert found["not_here"] == {"ray": "Ray is not installed here"}
    assert json.dumps(found)


def test_a_line_of_the_raw_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    assert command.read(raw) == []
    raw.write_text(2 * (json.dumps(line_of(ROW)) + "\n"))
    assert command.read(raw) == [ROW, ROW]
    assert row_of(json.loads(json.dumps(line_of(ROW)))) == ROW


class Search:
    """Stands for a search: processes that sleep, and what it is made to say."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.mark = f"mark of {folder}"
        self.said = [(0.0, line) for line in words]
        self.has_ended = False
        self.pid = -1
        self._started: list[subprocess.Popen[bytes]] = []

    def end(self) -> None:
        for one in self._started:
            one.kill()
            one.wait()

    def have(self, kind: str) -> psutil.Process:
        """Starts a process that looks like one of a kind."""
        words = {"agent": ["-m", "automesh", "agent"], "rank": ["automesh.worker.child"]}[kind]
        gang = {"AUTOMESH_GANG": "0/2@x"} if kind == "rank" else {}
        # Its first words are those of Python, which reads its program and sleeps.
        started = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(100)", *words],
            env={MARK: self.mark, **gang},
        )
        self._started.append(started)
        return psutil.Process(started.pid)


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Any]:
    search = Search(tmp_path, "compile 1/6")
    yield search
    search.end()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "_LOOK_S", 0.02)
    monkeypatch.setattr(study, "LIMIT_S", 0.5)
    monkeypatch.setattr(study, "WAIT_S", 1.0)


def killed(folder: Path) -> KilledStudy:
    place = FleetPlace(folder=folder, results=folder / "results", cluster=Local())
    return KilledStudy(
        place=place,
        launch="local",
        blows=[],
        luck=random.Random(0),
        say=lambda _: None,
    )


AGENT = Blow(launch="local", victim="agent", sign="KILL", stage="compile")


def test_who_is_not_replaced_is_waited_for_until_it_is_too_long(
    search: Any, tmp_path: Path, short: None
) -> None:
    search.have("agent")
    kill: Any = killed(tmp_path)._strike(search, AGENT)
    assert kill.waited_s == 1.0, "as long as it waits for anything"
    assert kill.went_on_s == -1.0
    assert "local agent KILL compile: the search did nothing more" in kill.faults


def test_who_is_replaced_has_gone_on(
    search: Any, tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = search.have("agent")
    send_signal = psutil.Process.send_signal

    def strike(struck: psutil.Process, sign: int) -> None:
        send_signal(struck, sign)
        search.have("agent")
        search.said.append((0.0, "compile 2/6"))

    monkeypatch.setattr(psutil.Process, "send_signal", strike)
    kill: Any = killed(tmp_path)._strike(search, AGENT)
    assert not first.is_running() or first.status() == psutil.STATUS_ZOMBIE
    assert kill.waited_s < 1.0
    assert 0.0 <= kill.went_on_s < 1.0
    assert kill.faults == ()


def test_nobody_to_be_struck_is_no_kill(search: Any, tmp_path: Path, short: None) -> None:
    search.have("rank")
    assert killed(tmp_path)._strike(search, AGENT) is None


def test_a_search_that_leaves_somebody_behind_is_told_of(
    search: Any, tmp_path: Path, short: None
) -> None:
    rank = search.have("rank")
    search.kill = lambda: None
    blow = Blow(launch="local", victim="search", sign="KILL", stage="compile")
    kill: Any = killed(tmp_path)._strike(search, blow)
    assert (kill.orphans, kill.waited_s) == (1, 0.5)
    deadline = time.monotonic() + 300
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it is ended, so that it does not disturb the next"
        time.sleep(0.02)


def test_the_stage_is_that_of_the_last_line_that_tells_of_one(search: Any, tmp_path: Path) -> None:
    one: Any = killed(tmp_path)
    search.said += [(0.0, "compile 2/6"), (0.0, "note: something")]
    assert one._stage(search) == "compile"
    search.said += [(0.0, "compile 6/6")]
    assert one._stage(search) == ""
    search.said += [(0.0, "confirm 1/12")]
    assert one._stage(search) == "measure"


def test_a_signal_has_its_number() -> None:
    assert study._SIGNS == {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}


def test_what_is_not_here_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "missing", lambda: {"ray": "Ray is not installed here"})
    for wrong, why in (("ray", "Ray is not installed here"), ("k8s", "is no launcher")):
        with pytest.raises(command.typer.BadParameter, match=why):
            command.main(kills=1, launch=[wrong], raw=None)


@pytest.mark.parametrize(
    ("code", "is_done", "faults"),
    [(0, True, 0), (1, False, 0), (128 + signal.SIGTERM, False, 0), (2, True, 1), (-11, True, 1)],
)
def test_an_end_that_nobody_expects_is_a_fault(
    search: Any, tmp_path: Path, code: int, is_done: bool, faults: int
) -> None:
    one: Any = killed(tmp_path)
    search.finish, search.words = lambda _: code, "error: no"
    assert one._is_done(search) is is_done
    assert len(one._faults) == faults
