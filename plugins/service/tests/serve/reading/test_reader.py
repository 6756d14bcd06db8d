"""The process that reads studies: killed, stopped, broken, replaced; and never left behind."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from automesh.errors import UsageError
from automesh_service.serve import catalogue as catalogues
from automesh_service.serve.catalogue import Catalogue
from automesh_service.serve.reading import reader as readers
from automesh_service.serve.reading.messages import Lane, Message
from automesh_service.serve.reading.reader import Away, ReaderProcess
from plugins.service.tests.support.service import make_measured
from tests.support.paths import ROOT

WAIT_S = 300.0
"""For a process to start or to end: imports take minutes on a machine that is busy otherwise."""
NAMES = tuple(f"train-gpu-h100-16-{number}" for number in range(3))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for name in NAMES:
        make_measured(tmp_path / name)
    return tmp_path


@pytest.fixture
def catalogue(results: Path) -> Iterator[Catalogue]:
    with closing(Catalogue(lambda: [results])) as found:
        yield found


def refresh(catalogue: Catalogue) -> None:
    """Looks until all studies were read."""

    def is_done() -> bool:
        is_behind = catalogue.refresh()
        return not is_behind and "unread" not in states(catalogue)

    until(is_done)


def pid_of(catalogue: Catalogue) -> int:
    found = catalogue.reader_pid
    assert found is not None
    return found


def until(is_so: Callable[[], object]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def states(catalogue: Catalogue) -> list[str]:
    known = catalogue.known()
    return [known[name].summary.state if name in known else "unread" for name in NAMES]


def test_a_reader_that_is_killed_is_replaced_and_nothing_is_read_twice(
    catalogue: Catalogue, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh(catalogue)
    before, pid = catalogue.known(), pid_of(catalogue)
    monkeypatch.setattr(readers, "MOST_KNOWN", 2)  # It is told of them in parts.
    os.kill(pid, signal.SIGKILL)
    make_measured(results / NAMES[0], step_s=0.125)
    refresh(catalogue)
    assert pid_of(catalogue) != pid
    until(lambda: not catalogue.refresh() and has_step(catalogue, NAMES[0]))
    after = catalogue.known()
    assert after[NAMES[0]].summary.step_s == 0.125
    assert [after[name] is before[name] for name in NAMES] == [False, True, True]
    assert "0.125" in catalogue.result(after[NAMES[0]])


def has_step(catalogue: Catalogue, name: str) -> bool:
    return catalogue.known()[name].summary.step_s == 0.125


DEADLY = """
import os, pathlib, signal, sys

if "automesh_service.serve.reading.process" in sys.orig_argv:
    from automesh_service.serve.reading import scan

    scan.QUICK_S, scan.READ_S = 3.0, 8.0

    from automesh_service.serve.reading import lanes, read

    lanes.ANSWER_S = 8.0
    usual, usual_answer = read.StudyReader.read, lanes.answer_of

    def suffer(name):
        for place in pathlib.Path(os.environ["DEADLY"]).glob(f"{name}.*"):
            match place.suffix:
                case ".stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case ".hang":
                    10 ** 10 ** 9  # one call of C, which lets go of nothing
                case _:
                    place.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)

    def deadly(self, name, found):
        suffer(name)
        return usual(self, name, found)

    def deadly_answer(question):
        suffer(pathlib.Path(question["folder"]).name)
        return usual_answer(question)

    read.StudyReader.read, lanes.answer_of = deadly, deadly_answer
"""


@pytest.fixture
def deadly(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder: for each file `STUDY.*` in it, a process that begins to read that study is killed
    and the file removed; or it stops or hangs if the file is called so."""
    folder = tmp_path_factory.mktemp("deadly")
    (folder / "sitecustomize.py").write_text(DEADLY)
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(one for one in paths if one))
    places = folder / "places"
    places.mkdir()
    monkeypatch.setenv("DEADLY", str(places))
    return places


def has_read(catalogue: Catalogue, *wanted: str) -> bool:
    catalogue.refresh()
    return tuple(states(catalogue)) == wanted


def test_killed_while_it_reads(catalogue: Catalogue, deadly: Path) -> None:
    for name in NAMES:
        (deadly / f"{name}.1").touch()
    until(lambda: has_read(catalogue, "ended", "ended", "ended"))
    assert list(deadly.iterdir()) == []


@pytest.mark.slow
def test_a_study_that_kills_its_reader_does_not_hide_the_others(
    catalogue: Catalogue, deadly: Path
) -> None:
    for number in range(3):
        (deadly / f"{NAMES[1]}.{number}").touch()
    catalogue.refresh()
    pid = pid_of(catalogue)
    until(lambda: has_read(catalogue, "ended", "unreadable", "ended"))
    assert "twice in a row" in catalogue.known()[NAMES[1]].summary.problem
    (results_,) = {one.folder.parent for one in catalogue.known().values()}
    make_measured(results_ / NAMES[1], step_s=0.125)
    catalogue.refresh()
    (last,) = deadly.iterdir()  # It was left alone, though it has changed.
    last.unlink()
    assert pid_of(catalogue) == pid


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stop", "hang"])
def test_studies_that_take_for_ever_to_be_read_cost_the_others_nothing(
    catalogue: Catalogue, deadly: Path, how: str
) -> None:
    """Also where the process that reads hears no signal but one."""
    stuck = (f"{NAMES[0]}.{how}", f"{NAMES[1]}.{how}")
    for name in stuck:
        (deadly / name).touch()
    listed: list[float] = []
    catalogue._on_listed = lambda: listed.append(time.monotonic())  # pyright: ignore
    began_s = time.monotonic()
    until(lambda: has_read(catalogue, "unread", "unread", "ended"))
    pid = pid_of(catalogue)
    assert time.monotonic() - listed[0] < 30  # `QUICK_S` is 3 s here.
    assert listed[0] - began_s < WAIT_S
    until(lambda: has_read(catalogue, "unreadable", "unreadable", "ended"))
    assert "could not be read within 8 s" in catalogue.known()[NAMES[0]].summary.problem
    until(lambda: "fsdp" in table_of(catalogue, NAMES[2]))
    with pytest.raises(Away, match="has not answered for 8 s"):
        catalogue.table(catalogue.known()[NAMES[0]], width=100, top=3)
    until(lambda: "fsdp" in table_of(catalogue, NAMES[2]))
    assert pid_of(catalogue) == pid  # Nobody else was replaced for it.
    catalogue.close()
    until(lambda: not copies_of(pid))


def table_of(catalogue: Catalogue, name: str) -> str:
    """The table of a study; nothing where it takes too long now, as on a busy machine."""
    with suppress(Away):
        return catalogue.table(catalogue.known()[name], width=100, top=3)
    return ""


def copies_of(pid: int) -> list[psutil.Process]:
    """Processes of the group of a process, which are its copies once it is gone."""
    found: list[psutil.Process] = []
    for one in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(one.pid) == pid and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


@pytest.mark.slow
def test_a_reader_that_is_stopped_is_replaced(
    catalogue: Catalogue, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh(catalogue)
    pid = pid_of(catalogue)
    os.kill(pid, signal.SIGSTOP)
    make_measured(results / NAMES[2], step_s=0.125)
    monkeypatch.setattr(readers, "SILENT_S", 0.2)
    monkeypatch.setattr(catalogues, "_ATTEMPTS", 1)  # Its successor may need longer than that.
    with pytest.raises(Away, match="has said nothing"):
        catalogue.refresh()
    assert is_gone(pid)
    monkeypatch.undo()
    until(lambda: not catalogue.refresh() and has_step(catalogue, NAMES[2]))


def ask_for_table(catalogue: Catalogue) -> tuple[threading.Thread, list[Any]]:
    """Asks for a table in a thread; gives the thread, and the answer or the error when it ends."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(catalogue.table(catalogue.known()[NAMES[0]], width=100, top=3))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, found


@pytest.mark.slow
def test_a_question_that_was_asked_of_a_killed_reader_is_answered_late(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "BACK_S", WAIT_S)
    refresh(catalogue)
    pid = pid_of(catalogue)
    os.kill(pid, signal.SIGSTOP)
    thread, found = ask_for_table(catalogue)
    time.sleep(0.2)
    assert found == []
    os.kill(pid, signal.SIGKILL)
    until(lambda: catalogue.reader_pid is None)
    refresh(catalogue)
    thread.join(WAIT_S)
    assert "fsdp:4,tp:4" in found[0]


def test_a_question_is_refused_while_nobody_starts_a_reader(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh(catalogue)
    os.kill(pid_of(catalogue), signal.SIGKILL)
    monkeypatch.setattr(readers, "BACK_S", 0.2)
    thread, found = ask_for_table(catalogue)
    thread.join(WAIT_S)
    assert isinstance(found[0], Away)
    assert "Traceback" not in found[0].message


@pytest.mark.slow
def test_a_question_without_an_answer_ends_the_reader(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh(catalogue)
    pid = pid_of(catalogue)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(readers, "QUESTION_S", 0.2)
    with pytest.raises(Away, match="has not answered"):
        catalogue.table(catalogue.known()[NAMES[0]], width=100, top=3)
    assert is_gone(pid)
    monkeypatch.undo()
    refresh(catalogue)
    assert "fsdp" in catalogue.table(catalogue.known()[NAMES[0]], width=100, top=3)


class LateLane(Lane):
    """Waits for an answer until the test says that it was long enough."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.is_late = threading.Event()

    def receive(self, limit_s: float | None = None) -> Message:
        del limit_s
        while not self.is_late.is_set():
            with suppress(TimeoutError):
                return super().receive(0.01)
        raise TimeoutError


class FakeProcess:
    """A process of which the test is the other side."""

    pid = 1

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(3)]
        (leash, _), (looks, self.looks), (lane, self.lane) = pairs
        self._others = [other for _, other in pairs]
        self.looks_here, self.lane_here = LateLane(looks), LateLane(lane)
        lanes: queue.LifoQueue[Lane] = queue.LifoQueue()
        lanes.put(self.lane_here)
        self.current = ReaderProcess(
            process=self,  # pyright: ignore[reportArgumentType]
            leash=leash,
            looks=self.looks_here,
            lanes=lanes,
        )

    def poll(self) -> int | None:
        return None if all(one.fileno() >= 0 for one in self._others) else -9

    def kill(self) -> None:
        for one in self._others:
            one.close()

    def wait(self, limit_s: float) -> int:
        del limit_s
        return -9


@dataclass(frozen=True, kw_only=True)
class AtWork:
    """A reader in the middle of a look, and of a question if there is one."""

    reader: readers.Reader
    process: FakeProcess
    threads: list[threading.Thread]
    errors: dict[str, Away]

    def end(self) -> dict[str, bool]:
        """Who may be to blame."""
        for one in self.threads:
            one.join(WAIT_S)
        self.process.current.looks.close()
        return {what: error.is_suspect for what, error in self.errors.items()}


def at_work(*, is_asked: bool) -> AtWork:
    process = FakeProcess()
    reader = readers.Reader(storage="", pause_s=0.0)
    reader._current = process.current  # pyright: ignore[reportPrivateUsage]
    errors: dict[str, Away] = {}

    def run(what: str, ask: Callable[[], object]) -> None:
        try:
            ask()
        except Away as error:
            errors[what] = error

    asks: dict[str, Callable[[], object]] = {
        "look": lambda: reader.look({"most": 1}, dict, lambda _: None)
    }
    if is_asked:
        asks["question"] = lambda: reader.ask({"what": "table"})
    threads = [threading.Thread(target=run, args=one) for one in asks.items()]
    for one in threads:
        one.start()
    assert process.looks.recv(100)
    if is_asked:
        assert process.lane.recv(100)
    return AtWork(reader=reader, process=process, threads=threads, errors=errors)


def test_who_is_asked_about_is_to_blame_before_who_is_looked_at() -> None:
    one = at_work(is_asked=True)
    one.process.kill()
    assert one.end() == {"look": False, "question": True}
    assert isinstance(one.errors["question"], readers.ReaderEnded)
    alone = at_work(is_asked=False)
    alone.process.kill()
    assert alone.end() == {"look": True}


def test_only_who_is_waited_for_in_vain_is_to_blame() -> None:
    one = at_work(is_asked=True)
    one.process.lane_here.is_late.set()
    assert one.end() == {"look": False, "question": True}
    assert "has not answered" in str(one.errors["question"])
    one = at_work(is_asked=True)
    one.process.looks_here.is_late.set()
    assert one.end() == {"look": True, "question": False}


def test_errors_of_a_study_come_over_as_they_are(catalogue: Catalogue, results: Path) -> None:
    refresh(catalogue)
    known = catalogue.known()[NAMES[0]]
    pid = pid_of(catalogue)
    with pytest.raises(UsageError, match="mesh_rules"):
        catalogue.diff(known, "what = ")
    (results / NAMES[0] / "study.db").unlink()
    with pytest.raises(UsageError, match="there is no study"):
        catalogue.result(known)
    assert pid_of(catalogue) == pid


def test_a_closed_catalogue_leaves_nothing(catalogue: Catalogue) -> None:
    refresh(catalogue)
    pid = pid_of(catalogue)
    catalogue.close()
    assert is_gone(pid)
    with pytest.raises(Away):
        catalogue.refresh()
    assert catalogue.reader_pid is None


SERVER = """
import sys, time
from pathlib import Path
from automesh_service.serve import server
from automesh_service.serve.catalogue import Catalogue
catalogue = Catalogue(lambda: [Path(sys.argv[1])])
while catalogue.refresh():
    pass
known = next(iter(catalogue.known().values()))
assert "fsdp" in catalogue.table(known, width=100, top=3)
print(catalogue.reader_pid, "optuna" in sys.modules, flush=True)
time.sleep(float(sys.argv[2]))
"""


def start_server(results: Path, *, rest_s: float) -> tuple[subprocess.Popen[str], int, str]:
    """A process that looks at studies as a server does; with the pid of its reader, and whether it
    has imported Optuna itself."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(results), str(rest_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pid, has_optuna = process.stdout.readline().split()
    return process, int(pid), has_optuna


@pytest.mark.slow
def test_the_server_reads_nothing_itself_and_its_reader_dies_with_it(results: Path) -> None:
    process, pid, has_optuna = start_server(results, rest_s=WAIT_S)
    with process:
        assert has_optuna == "False"
        assert not is_gone(pid)
        process.kill()
    until(lambda: is_gone(pid))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["its end", "the kernel"])
def test_the_leash_alone_ends_a_reader(catalogue: Catalogue, how: str) -> None:
    """Where the kernel does not see to it; and the other way round."""
    refresh(catalogue)
    pid = pid_of(catalogue)
    current = catalogue._reader._current  # pyright: ignore[reportPrivateUsage]
    assert current is not None
    if how == "its end":
        current.leash.close()
        assert current.process.wait(WAIT_S) == 0
    else:
        os.kill(pid, signal.SIGKILL)
        assert current.process.wait(WAIT_S) == -signal.SIGKILL
    refresh(catalogue)
    assert pid_of(catalogue) != pid
