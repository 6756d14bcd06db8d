"""A gang of two real processes under two real agents on this host: every way in which it ends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from automesh.errors import UsageError
from automesh.launch import wire
from automesh.launch.fleet import Fleet
from automesh.launch.local import LocalLauncher, local_launcher
from automesh.launch.secret import new_token
from automesh.outcomes import Failed, OutOfMemory, TimedOut
from automesh.worker.pool import Finished, Pool
from automesh.worker.protocol import NO_CHANNEL
from tests.support.worker_jobs import ROOT, answer_of, job, living, surroundings

MakePool = Callable[..., Pool]


@pytest.fixture(scope="module")
def notices() -> list[str]:
    return []


@pytest.fixture(scope="module")
def launcher() -> Iterator[LocalLauncher]:
    with local_launcher() as launcher:
        yield launcher
    assert living() == []


@pytest.fixture(scope="module")
def fleet(launcher: LocalLauncher, notices: list[str]) -> Iterator[Fleet]:
    with Fleet(
        token=new_token(),
        listen=("127.0.0.1", 0),
        hosts=2,
        launcher=launcher,
        memory_limit_bytes=400 * 2**20,
        notice=notices.append,
    ) as fleet:
        fleet.wait(120)
        yield fleet


@pytest.fixture
def pool(fleet: Fleet, tmp_path: Path) -> Iterator[Pool]:
    with Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path / "logs",
        memory_limit_bytes=400 * 2**20,
        handler="tests.support.handlers.in_gang",
        start=fleet.start_gang,
    ) as pool:
        yield pool


def finished(pool: Pool, *what: str, timeout_s: float = 60.0) -> Finished:
    pool.submit(job(*what), timeout_s)
    (only,) = pool.wait()
    return only


def failure(pool: Pool, *what: str, timeout_s: float = 60.0) -> Any:
    return finished(pool, *what, timeout_s=timeout_s).result


def goes_on(pool: Pool) -> None:
    assert answer_of(pool.run(job("agree", "all"), 60)).fingerprint == "4"


def test_all_are_told_the_same_and_the_slowest_counts(pool: Pool) -> None:
    answer = answer_of(pool.run(job("agree", "all"), 60))
    assert answer.samples_s == pytest.approx((0.2, 0.5))
    assert answer.setup_s == 2.0
    # The slower of the two says how many steps fill 0.1 s.
    assert answer.fingerprint == "4"
    again = answer_of(pool.run(job("agree", "all"), 60))
    assert again.peak_bytes == answer.peak_bytes, "a healthy gang is used again"
    pool.recycle()
    assert answer_of(pool.run(job("agree", "all"), 60)).peak_bytes != answer.peak_bytes


def test_who_ran_another_program_is_named(pool: Pool) -> None:
    found = failure(pool, "agree", "all", "a", "b")
    assert isinstance(found, Failed)
    assert found.where == "rank 1 on local-2"
    assert found.reason == "it ran another program than rank 0 on local-1"
    goes_on(pool)


def test_what_raises_on_one_rank_names_it_and_its_output(pool: Pool) -> None:
    found = failure(pool, "says", "1", "no such file on this host")
    assert isinstance(found, Failed)
    assert (found.stage, found.where) == ("run", "rank 1 on local-2")
    assert found.reason == "the step raised RuntimeError: no such file on this host"
    goes_on(pool)


def test_what_all_ranks_refuse_alike_is_nobodys_fault_and_keeps_the_gang(pool: Pool) -> None:
    before = answer_of(pool.run(job("agree", "all"), 60)).peak_bytes
    found = failure(pool, "raises", "all")
    assert isinstance(found, Failed)
    assert found.where == ""
    assert answer_of(pool.run(job("agree", "all"), 60)).peak_bytes == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (("hard_exit", "1", "3"), "the worker exited with code 3 while running the step"),
        (("suicide", "0"), "the worker was killed by SIGKILL while running the step"),
    ],
)
def test_who_ends_is_named_and_the_next_job_gets_a_new_gang(
    pool: Pool, what: tuple[str, ...], reason: str
) -> None:
    one = finished(pool, *what)
    assert isinstance(one.result, Failed)
    assert one.result.reason == reason
    assert one.result.where == f"rank {what[1]} on local-{int(what[1]) + 1}"
    assert one.doubtful == (what[0] == "suicide")
    goes_on(pool)


@pytest.mark.slow
def test_who_runs_out_of_memory_is_named(pool: Pool) -> None:
    found = failure(pool, "allocate", "1")
    assert isinstance(found, OutOfMemory)
    assert (found.where, found.is_host) == ("rank 1 on local-2", True)
    assert found.limit_bytes == 400 * 2**20
    goes_on(pool)


def test_a_hang_ends_at_the_timeout(pool: Pool) -> None:
    found = failure(pool, "hang", "1", timeout_s=2.0)
    assert isinstance(found, TimedOut)
    assert (found.stage, found.limit_s, found.where) == ("run", 2.0, "")
    goes_on(pool)


@pytest.mark.slow
def test_who_is_stopped_when_the_time_is_up_is_named(pool: Pool) -> None:
    found = failure(pool, "stop", "0", timeout_s=3.0)
    assert isinstance(found, TimedOut)
    assert found.where == "rank 0 on local-1"
    goes_on(pool)


@pytest.mark.slow
def test_who_is_stopped_for_long_is_ended_before_the_time_is_up(pool: Pool) -> None:
    begun_s = time.monotonic()
    one = finished(pool, "stop", "1", timeout_s=600.0)
    assert isinstance(one.result, Failed)
    assert one.result.reason == "its process was stopped by a signal for 8 s"
    assert one.result.where == "rank 1 on local-2"
    assert one.doubtful
    assert time.monotonic() - begun_s < 120
    goes_on(pool)


@pytest.mark.slow
def test_who_closes_its_channel_and_lives_is_ended_before_the_time_is_up(pool: Pool) -> None:
    found = failure(pool, "sever", "1", timeout_s=600.0)
    assert isinstance(found, Failed)
    assert found.reason == NO_CHANNEL
    assert found.where == "rank 1 on local-2"
    goes_on(pool)


@pytest.mark.slow
def test_what_a_process_says_may_be_anything(pool: Pool) -> None:
    for message in ({"ended": "by itself"}, {}):
        found = failure(pool, "nonsense", "1", json.dumps(message), timeout_s=600.0)
        assert isinstance(found, Failed)
        assert found.reason.startswith("the worker's message is not understood: ")
        assert found.where == "rank 1 on local-2"
    goes_on(pool)


def test_logs_of_all_ranks_are_gathered(pool: Pool, tmp_path: Path) -> None:
    failure(pool, "says", "1", "printed on the second host")
    goes_on(pool)
    texts = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert any("-rank0-local-1" in name for name in texts)
    assert any(
        "printed on the second host" in text
        for name, text in texts.items()
        if "-rank1-local-2" in name
    )


def test_a_lost_agent_costs_the_job_and_comes_back(
    pool: Pool, fleet: Fleet, launcher: LocalLauncher, notices: list[str]
) -> None:
    goes_on(pool)
    pool.submit(job("hang", "all"), 600)
    assert pool.wait(1.0) == []
    psutil.Process(launcher.pids[1]).kill()
    (one,) = pool.wait(60)
    assert isinstance(one.result, Failed)
    assert one.result.where == "rank 0 on local-1"
    assert one.result.reason.startswith("the agent on its host was lost: ")
    assert one.doubtful
    goes_on(pool)
    assert any(said.startswith("the agent on local-1 was lost: ") for said in notices)
    assert [facts.name for facts in fleet.facts] == ["local-2", "local-1"]


@pytest.mark.slow
def test_a_stopped_agent_is_ended_and_another_one_comes(
    pool: Pool,
    fleet: Fleet,
    launcher: LocalLauncher,
    notices: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on(pool)
    stopped = psutil.Process(launcher.pids[2])
    monkeypatch.setattr(wire, "LOST_S", 8.0)  # Of the search alone; its agents say more often.
    stopped.suspend()
    goes_on(pool)
    assert stopped.pid not in {facts.pid for facts in fleet.facts}
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
    assert "the agent on local-2 was lost: silent for 8 s" in notices


SEARCH = """
import sys, time
from pathlib import Path
from automesh.launch.fleet import Fleet
from automesh.launch.local import local_launcher
from automesh.launch.secret import new_token
from automesh.worker.pool import Pool
from tests.support.worker_jobs import job, surroundings

with local_launcher() as launcher:
    with Fleet(token=new_token(), listen=("127.0.0.1", 0), hosts=2, launcher=launcher) as fleet:
        fleet.wait(120)
        pool = Pool(
            size=1,
            surroundings=surroundings(),
            log_dir=Path(sys.argv[1]),
            memory_limit_bytes=2**30,
            handler="tests.support.handlers.in_gang",
            start=fleet.start_gang,
        )
        print(pool.run(job("agree", "all"), 100).fingerprint, flush=True)
        pool.submit(job("hang", "all"), 600)
        pool.wait(2.0)
        print("hangs", flush=True)
        pool.wait()
"""


@pytest.mark.slow
def test_a_search_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    before = {process.pid for process in living()}
    command = [sys.executable, "-c", SEARCH, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as search:
        assert search.stdout is not None
        assert search.stdout.readline() == "4\n"
        assert search.stdout.readline() == "hangs\n"
        assert len({process.pid for process in living()} - before) > 6  # agents, guardians, ranks
        search.kill()
    deadline = time.monotonic() + 300
    while {process.pid for process in living()} - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert {process.pid for process in living()} - before == set()


def test_too_few_agents_are_a_sentence() -> None:
    with (
        Fleet(token=new_token(), listen=("127.0.0.1", 0), hosts=2) as fleet,
        pytest.raises(UsageError, match=r"none of 2 agents has connected within 0 s") as caught,
    ):
        fleet.wait(0.3)
    assert caught.value.hint.startswith("run `automesh agent 127.0.0.1:")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="there is no IPv6 on this machine")
def test_processes_meet_at_an_address_of_ipv6(tmp_path: Path) -> None:
    with (
        local_launcher() as launcher,
        Fleet(token=new_token(), listen=("[::1]", 0), hosts=1, launcher=launcher) as fleet,
        Pool(
            size=1,
            surroundings=surroundings(),
            log_dir=tmp_path / "logs",
            memory_limit_bytes=2**30,
            handler="tests.support.handlers.in_gang",
            start=fleet.start_gang,
        ) as pool,
    ):
        fleet.wait(120)
        met = answer_of(pool.run(job("meets", "all"), 60)).fingerprint
    assert met.startswith("[::1]:")
