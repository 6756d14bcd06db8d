"""Whoever is killed, in whatever order: nothing of a worker is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from automesh.outcomes import Failed
from automesh.program.nouns import VisitAnswer
from automesh.worker.pool import Pool
from tests.support.worker_jobs import MEBIBYTE, ROOT, SLEEP_S, job, living, surroundings

PARENT = """
import sys
from pathlib import Path
from automesh.worker.pool import Pool
from tests.support.worker_jobs import job, surroundings

pool = Pool(
    size=2,
    surroundings=surroundings(),
    log_dir=Path(sys.argv[1]),
    memory_limit_bytes=2**30,
    handler="tests.support.handlers.misbehaving",
)
try:
    print("started", flush=True)
    for _ in range(2):
        pool.submit(job("leave_children", *sys.argv[2:]), 60, lambda _: print("event", flush=True))
    pool.wait()
except KeyboardInterrupt:
    pool.close()
    sys.exit(130)
"""


def start_parent(log_dir: Path, then: str = "hang") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log_dir), then, SLEEP_S],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def await_events(parent: subprocess.Popen[str], count: int) -> None:
    """Waits until the jobs have sent `count` events: both have left their children after four."""
    assert parent.stdout is not None
    for _ in range(count + 1):
        assert parent.stdout.readline()


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """One failing test must not make all others fail."""
    yield
    for process in living():
        process.kill()


def bury(parent: subprocess.Popen[str]) -> int:
    assert parent.stdout is not None
    parent.stdout.close()
    return parent.wait()


def assert_all_gone(within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while left := living():
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def words_of(process: psutil.Process) -> str:
    """Its command; nothing of one that has ended, as children of former tests may have just now."""
    try:
        return str(process.cmdline())
    except psutil.NoSuchProcess:  # a zombie, too
        return ""


def by_role(parent: psutil.Process) -> dict[str, list[psutil.Process]]:
    deputies = [child for child in parent.children() if "guardian.py" in words_of(child)]
    guardians = [child for deputy in deputies for child in deputy.children()]
    # Its first child: those that it adopted came later.
    workers = [min(guardian.children(), key=psutil.Process.create_time) for guardian in guardians]
    return {
        "parent": [parent],
        "deputy": deputies,
        "guardian": guardians,
        "worker": workers,
    }


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    parent = start_parent(tmp_path)
    await_events(parent, 4)
    deadline = time.monotonic() + 300
    while len(living()) < 1 + 2 * 8:  # Per worker: deputy, guardian, itself, five descendants.
        assert time.monotonic() < deadline
    parent.kill()
    assert_all_gone()
    assert bury(parent) == -signal.SIGKILL


def test_ctrl_c_ends_the_parent_alone_and_quickly(tmp_path: Path) -> None:
    parent = start_parent(tmp_path)
    await_events(parent, 4)
    roles = by_role(psutil.Process(parent.pid))
    assert len({os.getsid(p.pid) for role in roles for p in roles[role]}) == 5
    started = time.monotonic()
    os.killpg(parent.pid, signal.SIGINT)
    code = bury(parent)
    assert time.monotonic() - started < 120  # Its jobs last a thousand seconds.
    assert code == 130
    assert living() == []


@pytest.mark.parametrize("role", ["deputy", "guardian"])
def test_no_parent_is_needed_to_clean_up(tmp_path: Path, role: str) -> None:
    parent = start_parent(tmp_path)
    await_events(parent, 4)
    roles = by_role(psutil.Process(parent.pid))
    parent.kill()
    for process in roles[role]:
        process.kill()
    assert_all_gone()
    assert bury(parent) == -signal.SIGKILL


def test_even_without_anybody_the_worker_itself_dies(tmp_path: Path) -> None:
    parent = start_parent(tmp_path)
    await_events(parent, 4)
    roles = by_role(psutil.Process(parent.pid))
    assert len(roles["worker"]) == 2
    for process in (parent, *roles["deputy"], *roles["guardian"]):
        # Some end by themselves as soon as the one before them is gone.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    bury(parent)
    assert not psutil.wait_procs(roles["worker"], timeout=60)[1]


@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.long)])
def test_kills_at_random_moments_leave_nothing(tmp_path: Path, kills: int) -> None:
    chance = random.Random(2)
    for _ in range(kills):
        parent = start_parent(tmp_path)
        await_events(parent, chance.randrange(5))
        time.sleep(chance.random() * 0.1)
        roles = by_role(psutil.Process(parent.pid))
        # Of guardian and deputy one must live to clean up after the other.
        victims = ["parent", "worker", chance.choice(["guardian", "deputy"])]
        for role in chance.sample(victims, chance.randint(1, 3)):
            for process in roles[role]:
                # One may follow another of its own accord.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(chance.random() * 0.05)
        parent.kill()
        bury(parent)
        assert_all_gone()


@pytest.mark.parametrize("role", ["deputy", "guardian", "worker"])
def test_whoever_is_killed_the_job_has_an_outcome(tmp_path: Path, role: str) -> None:
    with Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path,
        memory_limit_bytes=400 * MEBIBYTE,
        handler="tests.support.handlers.misbehaving",
    ) as pool:

        def on_event(event: dict[str, object]) -> None:
            if event["event"] == "hanging":
                (victim,) = by_role(psutil.Process())[role]
                victim.kill()

        result = pool.run(job("leave_children", "hang", SLEEP_S), 30, on_event)
        assert isinstance(result, Failed)
        how = "killed by SIGKILL" if role == "worker" else "lost"
        assert result.reason == f"the worker was {how} while building the step"
        assert living() == []
        assert isinstance(pool.run(job("answer"), 30), VisitAnswer)
    assert living() == []


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("role", ["deputy", "guardian", "worker"])
def test_who_is_stopped_does_not_hold_up_the_end(tmp_path: Path, role: str) -> None:
    parent = start_parent(tmp_path)
    await_events(parent, 4)
    roles = by_role(psutil.Process(parent.pid))
    for process in roles[role]:
        process.suspend()
    started = time.monotonic()
    parent.send_signal(signal.SIGINT)
    assert bury(parent) == 130
    assert time.monotonic() - started < 120  # Its jobs last a thousand seconds.
    assert_all_gone()


def test_a_pool_that_is_forgotten_ends_its_workers(tmp_path: Path) -> None:
    script = PARENT.replace("    pool.wait()", "    pool.wait(0.5)\n    sys.exit(0)")
    command = [sys.executable, "-c", script, str(tmp_path), "hang", SLEEP_S]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert_all_gone()


def test_a_fork_of_the_parent_does_not_keep_workers_alive(tmp_path: Path) -> None:
    # The copy holds the leash open: only the change of the deputy's parent tells of the death.
    script = PARENT.replace(
        "    pool.wait()", "    if os.fork() == 0: time.sleep(1000)\n    pool.wait()"
    )
    command = [sys.executable, "-c", "import os, time\n" + script, str(tmp_path), "hang", SLEEP_S]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    await_events(parent, 4)
    (copy,) = [p for p in psutil.Process(parent.pid).children() if p.cmdline()[1] == "-c"]
    parent.kill()
    bury(parent)
    deadline = time.monotonic() + 300
    while [p for p in living() if p.pid != copy.pid]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert copy.is_running()
    os.kill(copy.pid, signal.SIGKILL)
