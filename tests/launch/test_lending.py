"""Compiles on the hosts of a search: where they start, what comes back, what a bad host costs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from automesh.errors import UsageError
from automesh.hardware import parse_target
from automesh.hlo.store import ModuleStore
from automesh.launch.agent import stored_in
from automesh.launch.cluster import Cluster, spread
from automesh.launch.facts import HostFacts
from automesh.launch.fleet import Fleet
from automesh.launch.gang import Gang
from automesh.launch.lending import Lender
from automesh.launch.local import LocalLauncher, local_launcher
from automesh.launch.secret import new_token
from automesh.mesh.axes import MeshAxis, Plan
from automesh.program.nouns import CompileAnswer, Entry, Lowered, StepRef
from automesh.worker.messages import CompileJob
from automesh.worker.pool import Pool
from tests.support.worker_jobs import living, surroundings

LIMIT_BYTES = 400 * 2**20


def facts(name: str, *, cores: int = 8, gib: int = 64, machine: str = "") -> HostFacts:
    return HostFacts(
        name=name,
        machine=machine or name,
        pid=1,
        address="10.0.0.1",
        versions=(),
        platforms="cpu",
        cores=cores,
        memory_bytes=gib * 2**30,
    )


@dataclass
class Hosts:
    """A fleet whose processes are only noted."""

    present: tuple[tuple[int, HostFacts], ...]
    started: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    calls: int = 0

    def start_process(self, number: int, gang: Gang, *_: object, share: int) -> None:
        self.started.append((number, share))

    def restart_lost(self) -> None:
        self.calls += 1


def lender_of(hosts: Hosts, notices: list[str] | None = None) -> Lender:
    say = [] if notices is None else notices
    return Lender(cast("Any", hosts), needed_bytes=2 * 2**30, notice=say.append)


def start(lender: Lender) -> Gang:
    return lender.start_worker(
        surroundings=surroundings(), log=Path("x.log"), memory_limit_bytes=0, handler="x"
    )


def test_a_host_has_room_by_its_cores_and_its_memory() -> None:
    hosts = Hosts(
        (
            (1, facts("many cores", cores=64, gib=10)),
            (2, facts("much memory", cores=4, gib=512)),
            (3, facts("small", cores=1, gib=1)),
            (4, facts("half a", cores=8, machine="shared")),
            (5, facts("half b", cores=8, machine="shared")),
        )
    )
    assert lender_of(hosts).room() == 5 + 4 + 1 + 4 + 4
    assert hosts.calls == 1


def test_the_emptiest_is_next_and_all_are_filled_evenly() -> None:
    hosts = Hosts(((1, facts("a", cores=4)), (2, facts("b", cores=2))))
    lender = lender_of(hosts)
    gangs = [start(lender) for _ in range(6)]
    assert sorted(number for number, _ in hosts.started) == [1, 1, 1, 1, 2, 2]
    assert sorted(number for number, _ in hosts.started[:3]) == [1, 1, 2]
    assert set(hosts.started) == {(1, 4), (2, 2)}
    assert lender.load() == {1: 4, 2: 2}
    gangs[0].collect_ending()
    assert sum(lender.load().values()) == 5
    for gang in gangs[1:]:
        gang.collect_ending()


def test_a_host_on_which_processes_are_lost_at_once_is_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts, notices = Hosts(((1, facts("bad")), (2, facts("good")))), []
    lender = lender_of(hosts, notices)
    monkeypatch.setattr(Gang, "lost_at_start", "no room on its disk")
    for _ in range(6):
        gang = start(lender)
        if hosts.started[-1][0] == 2:
            with monkeypatch.context() as good:
                good.setattr(Gang, "lost_at_start", "")
                good.setattr(Gang, "served", 1)
                gang.collect_ending()
        else:
            gang.collect_ending()
    assert [number for number, _ in hosts.started] == [1, 2, 2, 2, 2, 2], "it is the last choice"
    hosts.present = hosts.present[:1]
    for _ in range(2):
        start(lender).collect_ending()
    (said,) = notices
    assert said == (
        "bad is not used any more: 3 processes in a row failed to start there (no room on its disk)"
    )
    assert lender.room() == 0
    with pytest.raises(OSError, match="no host is left to compile on"):
        start(lender)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalLauncher]:
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path / "of-agents"))
    with local_launcher() as launcher:
        yield launcher
    assert living() == []


def compile_job(number: int, store: ModuleStore, notes: Path, seconds: float) -> CompileJob:
    entry = Entry(
        kind="script", location="/train.py", function="build", argv=(str(seconds), str(notes))
    )
    return CompileJob(
        step=StepRef(entry=entry),
        plan=Plan(axes=(MeshAxis(name="dp", ici=number),)),
        cache_dir="",
        store_dir=str(store.folder),
    )


@pytest.mark.slow
def test_two_agents_compile_for_one_search(launcher: LocalLauncher, tmp_path: Path) -> None:
    """Each program once, what they compile comes back, and a lost agent gives its jobs back."""
    store = ModuleStore(tmp_path / "of-the-search" / "modules")
    notes = tmp_path / "notes"
    notes.mkdir()
    fleet = Fleet(
        token=new_token(),
        listen=("127.0.0.1", 0),
        hosts=2,
        launcher=launcher,
        memory_limit_bytes=LIMIT_BYTES,
        store=store,
    )
    programs: set[str] = set()

    def on_event(event: dict[str, Any]) -> dict[str, Any] | None:
        if event["event"] != "lowered":
            return None
        go = event["fingerprint"] not in programs
        programs.add(event["fingerprint"])
        return {"go": go}

    with fleet:
        fleet.wait(120)
        lender = Lender(fleet, needed_bytes=2**20)
        with Pool(
            size=2,
            surroundings=surroundings(),
            log_dir=tmp_path / "logs",
            memory_limit_bytes=LIMIT_BYTES,
            handler="tests.support.handlers.lent",
            start=lender.start_worker,
            room=lender.room,
        ) as pool:
            for number in (2, 3, 4, 5, 6):
                pool.submit(compile_job(number, store, notes, 0.1), 60, on_event)
            answers = []
            while pool.unfinished:
                answers += [one.result for one in pool.wait(60)]
            assert sorted(type(one).__name__ for one in answers) == [
                *["CompileAnswer"] * 3,
                *["Lowered"] * 2,
            ]
            assert len(list(notes.iterdir())) == 3, "each program was compiled once"
            for answer in answers:
                if isinstance(answer, CompileAnswer):
                    found = store.find(answer.stored)
                    assert found is not None
                    assert found.module == answer.fingerprint.encode() * 1000
            assert sum(lender.load().values()) == 2
            assert set(lender.load()) == {1, 2}, "on both"

            slow = compile_job(20, store, notes, 600.0)
            pool.submit(slow, 600, lambda event: {"go": True} if "fingerprint" in event else None)
            while not any("program of 10" in path.name for path in notes.iterdir()):
                pool.wait(0.1)
            busy = next(path for path in notes.iterdir() if "program of 10" in path.name)
            worker = int(busy.name.split()[3])
            agent = next(one.pid for _, one in fleet.present if worker in descendants(one.pid))
            os.kill(agent, signal.SIGKILL)
            (lost,) = pool.wait(60)
            assert lost.doubtful, "so the search tries it again"
            deadline = time.monotonic() + 300
            while lender.room() < 2 or len(fleet.present) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            again = compile_job(4, store, notes, 0.0)
            refused = pool.run(again, 60, lambda event: {"go": False})
            assert isinstance(refused, Lowered)


def descendants(pid: int) -> set[int]:
    return {one.pid for one in psutil.Process(pid).children(recursive=True)}


def test_what_an_answer_has_stored_is_found_at_any_depth() -> None:
    answer = {
        "stored": "a",
        "pipeline": {"programs": [{"stored": "b"}, {"stored": ""}, {"stored": "a"}]},
    }
    assert sorted(stored_in(answer)) == ["a", "b"]
    assert stored_in({"memory": {"peak_bytes": 1}}) == []


def test_devices_that_are_not_here_are_compiled_for_on_as_many_hosts_as_asked() -> None:
    target = parse_target("tpu-v5p-128", {})
    assert spread(target, Cluster(hosts=4, listen="10.0.0.1")) == target
    assert spread(target, Cluster()) == target
    with pytest.raises(UsageError, match="on several hosts, their number is needed"):
        spread(target, Cluster(listen="10.0.0.1"))
