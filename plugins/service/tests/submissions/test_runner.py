"""The runner: searches as commands, found again after kills, ended when that is asked for."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from automesh_service.submissions import runner as runner_module
from automesh_service.submissions.audit import Audit
from automesh_service.submissions.bundle import check
from automesh_service.submissions.home import open_home
from automesh_service.submissions.order import Order
from automesh_service.submissions.runner import SubmissionRunner, main, tell_to_stop
from automesh_service.submissions.store import Store
from plugins.service.tests.support.service import SCRIPT, tar_of

ORDER = Order(entry="train.py", targets=("cpu:2",))
# What stands for a search: it notes that it runs, and ends as its script's argument says.
SEARCH = """
import pathlib, signal, sys, time
job, how = pathlib.Path(sys.argv[1]), sys.argv[2]
with (job / "runs").open("a") as runs:
    runs.write("run\\n")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
if how == "wait":
    while not (job / "go").exists():
        time.sleep(0.02)
if how == "refuse":
    sys.stderr.write("error: there is no `build`\\nhint: write one\\n")
    sys.exit(2)
if how == "nothing":
    sys.exit(1)
(job / "mesh_rules.toml").write_text("schema = 1\\n")
print('{"best": 1}')
"""


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[SubmissionRunner]:
    """A runner whose searches are stand-ins."""

    def words(order: Order, job: Path) -> list[str]:
        return [sys.executable, "-c", SEARCH, str(job), *(order.args or ("found",)), "--json"]

    monkeypatch.setattr(runner_module, "words_of", words)
    monkeypatch.setattr(runner_module, "TICK_S", 0.02)
    found = SubmissionRunner(home=open_home(tmp_path / "service"))
    yield found
    for held in found.running.values():
        if held.process is not None:
            held.process.kill()
            held.process.wait()
    found.database.close()


def submit(runner: SubmissionRunner, *args: str, key: str = "k" * 8) -> str:
    draft = runner.home.folder / "draft"
    draft.write_bytes(tar_of({"train.py": SCRIPT}))
    bundle = check(draft)
    runner.store.keep_bundle(draft, bundle, "ann")
    order = Order(entry="train.py", targets=("cpu:2",), args=args)
    return runner.store.submit(order, bundle.digest, owner="ann", key=key)[0].number


def until(runner: SubmissionRunner, is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 300
    while not is_so():
        assert time.monotonic() < end_s
        runner.look_after()
        runner.start_more()
        time.sleep(0.02)


def state(runner: SubmissionRunner, number: str) -> str:
    return runner.store.get(number, None).state


def runs(runner: SubmissionRunner, number: str) -> int:
    path = runner.home.job(number) / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("how", "ending", "said"),
    [
        ("found", "found", "a rule was found"),
        ("nothing", "nothing", "nothing may become a rule"),
        ("refuse", "failed", "there is no `build`"),
    ],
)
def test_how_a_search_ends(one: SubmissionRunner, how: str, ending: str, said: str) -> None:
    number = submit(one, how)
    until(one, lambda: state(one, number) == ending)
    assert one.store.get(number, None).said == said
    assert runs(one, number) == 1
    assert (one.home.job(number) / "bundle" / "train.py").read_bytes() == SCRIPT
    noted = [(entry.action, entry.who, entry.said) for entry in Audit(one.database).entries()]
    assert noted == [("end", "ann", ending), ("run", "ann", "")]


def test_one_after_the_other(one: SubmissionRunner) -> None:
    first, second = submit(one, "wait"), submit(one, key="l" * 8)
    until(one, lambda: runs(one, first) == 1)
    assert (state(one, first), state(one, second)) == ("running", "queued")
    (one.home.job(first) / "go").touch()
    until(one, lambda: state(one, second) == "found")
    assert state(one, first) == "found"


def test_a_search_that_runs_is_cancelled_and_resumed(one: SubmissionRunner) -> None:
    number = submit(one, "wait")
    until(one, lambda: runs(one, number) == 1)
    one.store.cancel(number, "ann")
    until(one, lambda: state(one, number) == "cancelled")
    (one.home.job(number) / "go").touch()
    one.store.resume(number, "ann")
    until(one, lambda: state(one, number) == "found")
    assert runs(one, number) == 2


def test_a_search_that_somebody_kills_is_run_again(one: SubmissionRunner) -> None:
    number = submit(one, "wait")
    until(one, lambda: runs(one, number) == 1)
    held = one.running[number].process
    assert held is not None
    held.kill()
    (one.home.job(number) / "go").touch()
    until(one, lambda: state(one, number) == "found")
    assert runs(one, number) == 2


def test_a_search_outlives_its_runner_and_is_run_once(one: SubmissionRunner) -> None:
    number = submit(one, "wait")
    until(one, lambda: runs(one, number) == 1)
    # As after SIGKILL: the next runner knows nothing but what is on the disk.
    left = one.running.pop(number).process
    assert left is not None
    other = SubmissionRunner(home=one.home)
    try:
        other.adopt(other.store.get(number, None))
        assert state(other, number) == "running"
        other.look_after()
        other.start_more()
        assert (state(other, number), runs(other, number)) == ("running", 1)
        (one.home.job(number) / "go").touch()
        left.wait(60)
        until(other, lambda: state(other, number) == "found")
        assert runs(other, number) == 1
        # Once more, and this one is told to end by a runner that has not started it.
        (one.home.job(number) / "go").unlink()
        other.store.resume(number, "ann")
        until(one, lambda: runs(one, number) == 2)
        left = one.running.pop(number).process
        assert left is not None
        other.adopt(other.store.get(number, None))
        other.store.cancel(number, "ann")
        end_s = time.monotonic() + 300
        while left.poll() is None and time.monotonic() < end_s:
            other.look_after()
            time.sleep(0.02)
        until(other, lambda: state(other, number) == "cancelled")
        assert left.returncode == 143
    finally:
        for held in other.running.values():
            held.tell_to_end()
        other.database.close()


def test_a_runner_killed_before_its_search_began_is_no_end_for_the_next(
    one: SubmissionRunner,
) -> None:
    """Neither without the folder of the submission, nor with what a former run has left there."""
    number = submit(one)
    assert one.store.start_next() is not None  # and then SIGKILL
    one.adopt(one.store.get(number, None))
    assert state(one, number) == "queued"
    until(one, lambda: state(one, number) == "found")
    one.store.extend(number, "2m", owner="ann", who="ann", key="e" * 8)
    assert one.store.start_next() is not None
    one.adopt(one.store.get(number, None))
    assert state(one, number) == "queued"
    until(one, lambda: state(one, number) == "found")
    assert runs(one, number) == 2


def test_only_runs_that_somebody_killed_count_until_they_are_too_many(
    one: SubmissionRunner,
) -> None:
    number = submit(one)

    def cut(*, is_meant: bool) -> str:
        assert one.store.start_next() is not None
        return one.store.cut(number, is_meant=is_meant).state

    assert {cut(is_meant=True) for _ in range(9)} == {"queued"}
    assert [cut(is_meant=False) for _ in range(5)] == [*["queued"] * 4, "failed"]
    assert "5 times" in one.store.get(number, None).said
    one.store.resume(number, "ann")
    assert cut(is_meant=False) == "queued"


def test_a_cancel_at_the_moment_of_the_end_is_not_lost(one: SubmissionRunner) -> None:
    number = submit(one)
    before = one.store.start_next()
    assert before is not None
    one.store.cancel(number, "ann")
    one.adopt(before)  # what the runner had read a moment ago
    assert state(one, number) == "cancelled"


@pytest.mark.parametrize("name", ["result.json", "search.log", "search.lock", "process.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_a_search_puts_in_the_place_of_our_files_stops_nobody(
    one: SubmissionRunner, tmp_path: Path, name: str, kind: str
) -> None:
    number = submit(one, "nothing")
    until(one, lambda: state(one, number) == "nothing")
    place, elsewhere = one.home.job(number) / name, tmp_path / "elsewhere"
    place.unlink(missing_ok=True)
    elsewhere.write_text("untouched")
    {
        "pipe": lambda: os.mkfifo(place),
        "folder": place.mkdir,
        "link": lambda: place.symlink_to(elsewhere),
    }[kind]()
    one.store.resume(number, "ann")
    until(one, lambda: state(one, number) in ("nothing", "failed"))
    one.store.resume(number, "ann")
    assert one.store.start_next() is not None
    one.adopt(one.store.get(number, None))
    assert state(one, number) == "queued"
    assert elsewhere.read_text() == "untouched"


def test_a_search_whose_number_was_not_noted_is_cancelled_all_the_same(
    one: SubmissionRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = runner_module.words_of

    def with_rules(order: Order, job: Path) -> list[str]:
        return [*words(order, job)[:-1], f"--rules={job / 'mesh_rules.toml'}", "--json"]

    monkeypatch.setattr(runner_module, "words_of", with_rules)
    number = submit(one, "wait")
    until(one, lambda: runs(one, number) == 1)
    left = one.running.pop(number).process
    assert left is not None
    (one.home.job(number) / "process.json").unlink()
    one.adopt(one.store.get(number, None))
    one.store.cancel(number, "ann")
    until(one, lambda: left.poll() is not None)
    until(one, lambda: state(one, number) == "cancelled")


def test_a_search_has_no_token_of_the_service_and_is_known_by_its_number(
    one: SubmissionRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMESH_SERVER_TOKEN", "amt_secret")
    number = submit(one, "wait")
    until(one, lambda: runs(one, number) == 1)
    held = one.running[number].process
    assert held is not None
    environment = Path(f"/proc/{held.pid}/environ").read_bytes()
    assert b"amt_secret" not in environment
    folder = one.home.job(number) / "bundle"
    assert f"AUTOMESH_BUNDLE={number}:{folder}\0".encode() in environment


def test_what_cannot_be_started_is_told(one: SubmissionRunner) -> None:
    number = submit(one)
    digest = one.store.get(number, None).digest
    one.home.bundle(digest).write_bytes(b"no tar")
    until(one, lambda: state(one, number) == "failed")
    assert "no tar" in one.store.get(number, None).said


def test_a_stopped_runner_queues_what_it_ran(one: SubmissionRunner) -> None:
    number = submit(one, "wait")
    until(one, lambda: runs(one, number) == 1)
    store = Store(one.home, one.database)
    one.is_stopping = True
    one.running[number].tell_to_end()
    end_s = time.monotonic() + 300
    while one.running and time.monotonic() < end_s:
        one.look_after()
        time.sleep(0.02)
    assert store.get(number, None).state == "queued"


def test_the_process_ends_when_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loop, in this process: signals and the lock included."""
    home = open_home(tmp_path / "service")
    monkeypatch.setattr(runner_module, "TICK_S", 0.01)
    monkeypatch.setattr(runner_module, "_BEAT_S", 0.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    seen: list[bool] = []
    beat = SubmissionRunner.beat

    def beating(self: SubmissionRunner, *, is_new: bool = False) -> None:
        beat(self, is_new=is_new)
        if not is_new:
            seen.append(self.is_stopping)
            tell_to_stop(self.database)

    monkeypatch.setattr(SubmissionRunner, "beat", beating)
    try:
        main([str(home.folder), "1", ""])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert seen == [False, True]
    # Without a server and without work it ends by itself.
    monkeypatch.setattr(SubmissionRunner, "beat", beat)
    monkeypatch.setattr(runner_module, "_ALONE_S", 0.05)
    SubmissionRunner(home=home).serve()
