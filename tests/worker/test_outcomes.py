"""Everything that user code may do in a worker is a named outcome, and the pool goes on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from automesh.outcomes import OutOfMemory, TimedOut
from automesh.worker.pool import Pool
from tests.support.worker_jobs import (
    MEBIBYTE,
    answer_of,
    failure_of,
    job,
    living,
    surroundings,
)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path_factory.mktemp("logs"),
        memory_limit_bytes=400 * MEBIBYTE,
        handler="tests.support.handlers.misbehaving",
    ) as pool:
        yield pool
    assert living() == []


def test_events_are_told_and_answered(pool: Pool) -> None:
    events: list[dict[str, Any]] = []

    def on_event(event: dict[str, Any]) -> dict[str, Any] | None:
        events.append(event)
        return {"go": False} if event["event"] == "lowered" else None

    result = answer_of(pool.run(job("ask", "300000"), 30, on_event))
    assert result.fingerprint == "{'go': False}"
    assert [event["event"] for event in events] == ["stage", "lowered"]
    assert len(events[1]["fingerprint"]) == 300_000
    assert answer_of(pool.run(job("ask"), 30)).fingerprint == "{}"


def test_a_reply_larger_than_any_buffer_arrives(pool: Pool) -> None:
    reply = {"go": "x" * 2**21}
    result = pool.run(job("ask"), 30, lambda event: reply if "reply" in event else None)
    assert len(answer_of(result).fingerprint) > 2**21


ENDINGS = [
    ("raises", (), "build", "`raises` raised ValueError: batch 3 is not"),
    ("raises_unprintable", (), "build", "`raises_unprintable` raised Odd: (its message cannot be"),
    ("usage_error", (), "build", "no `build`"),
    ("exits", ("0",), "build", "the script called sys.exit(0)"),
    ("exits", ("bad batch",), "build", "the script called sys.exit('bad batch')"),
    ("interrupt", (), "build", "`interrupt` raised KeyboardInterrupt"),
    ("hard_exit", ("0",), "build", "the worker exited with code 0 while building the step"),
    ("hard_exit", ("3",), "build", "the worker exited with code 3 while building the step"),
    ("abort", (), "compile", "the worker was killed by SIGABRT while compiling"),
    ("segfault", (), "compile", "the worker was killed by SIGSEGV while compiling"),
    ("suicide", (), "build", "the worker was killed by SIGKILL while building the step"),
    ("kill_group", ("9",), "build", "the worker was lost while building the step"),
    ("wrong_noun", (), "build", "a job of kind visit was answered with a Lowered"),
    ("garbage", (), "build", "a job of kind visit was answered with a dict"),
    ("wrong_inside", (), "build", "`samples_s`"),
    ("not_there", (), "build", "`not_there` raised KeyError: 'not_there'"),
]


@pytest.mark.parametrize(("function", "argv", "stage", "reason"), ENDINGS)
def test_every_ending_has_a_stage_and_a_reason(
    pool: Pool, function: str, argv: tuple[str, ...], stage: str, reason: str
) -> None:
    failed = failure_of(pool.run(job(function, *argv), 30))
    assert failed.stage == stage
    assert failed.reason.startswith(reason)
    assert answer_of(pool.run(job("answer", "next"), 30)).fingerprint == "next"


def test_a_traceback_shows_the_users_frames_alone(pool: Pool) -> None:
    tail = failure_of(pool.run(job("raises"), 30)).log_tail
    assert "KeyError: 'batch'" in tail
    assert 'raise ValueError("batch 3 is not' in tail
    assert tail.endswith("divisible by 2")
    assert "child.py" not in tail


@pytest.mark.parametrize(
    ("function", "argv", "text"),
    [
        ("exits", ("2",), "usage: train.py"),
        ("hard_exit", ("1",), "leaving"),
        ("segfault", (), "in segfault"),
        ("progress", (), "\n100%\n"),
    ],
)
def test_the_log_tail_tells_of_this_job_alone(
    pool: Pool, function: str, argv: tuple[str, ...], text: str
) -> None:
    failure_of(pool.run(job("raises"), 30))
    tail = failure_of(pool.run(job(function, *argv), 30)).log_tail
    assert text in "\n" + tail
    assert "before" not in tail
    assert "\x1b" not in tail


def test_output_that_comes_after_the_failure_is_waited_for(pool: Pool) -> None:
    """Output goes through the guardian, which a busy machine may let wait; the failure does not."""
    # Its output ends with a last line, too: that must not be taken for the next job's.
    failure_of(pool.run(job("say_and_refuse", "the job before"), 30))
    guarded = [one for one in living() if "guardian.py" in " ".join(one.cmdline())]
    (guardian,) = (one for one in guarded if one.parent() in guarded)
    guardian.suspend()
    going_on = threading.Timer(0.5, guardian.resume)
    going_on.start()
    try:
        failed = failure_of(pool.run(job("say_and_refuse", "I am late"), 30))
    finally:
        going_on.join()
    assert failed.reason == "no `build`"
    assert failed.log_tail.startswith("I am late\n")


def test_a_job_may_carry_its_own_outcome(pool: Pool) -> None:
    result = pool.run(job("outcome"), 30)
    assert result == OutOfMemory(stage="run", needed_bytes=9, limit_bytes=8, detail="HBM")


def test_running_out_of_memory_in_python_is_an_outcome(pool: Pool) -> None:
    result = pool.run(job("memory_error"), 30)
    assert isinstance(result, OutOfMemory)
    assert result.stage == "materialize"
    assert result.needed_bytes > 10 * MEBIBYTE
    assert result.limit_bytes == 400 * MEBIBYTE


@pytest.mark.parametrize("function", ["allocate", "allocate_in_children"])
def test_passing_the_memory_limit_is_an_outcome(pool: Pool, function: str) -> None:
    result = pool.run(job(function), 30)
    assert isinstance(result, OutOfMemory)
    # The upper end is only the sign of being stopped soon; on a busy machine soon is long.
    assert 400 * MEBIBYTE < result.needed_bytes < 4000 * MEBIBYTE
    assert result.stage == "build"
    assert "killed by automesh because of its host memory" in result.detail
    answer_of(pool.run(job("answer"), 30))


@pytest.mark.parametrize("function", ["hang", "hang_holding_gil"])
def test_a_hanging_job_times_out(pool: Pool, function: str) -> None:
    answer_of(pool.run(job("answer"), 30))
    started = time.monotonic()
    result = pool.run(job(function), 0.4)
    assert isinstance(result, TimedOut)
    assert (result.stage, result.limit_s) == ("build", 0.4)
    assert "hanging" in result.log_tail or function != "hang"
    assert time.monotonic() - started < 120  # It would hang for a thousand seconds.
    answer_of(pool.run(job("answer"), 30))


@pytest.mark.parametrize("function", ["break_streams", "replace_stdout"])
def test_broken_streams_do_not_matter_and_the_next_job_is_logged(pool: Pool, function: str) -> None:
    first = answer_of(pool.run(job(function), 30))
    if function == "break_streams":
        failed = failure_of(pool.run(job("say", "I am heard"), 30))
        assert "I am heard" in failed.log_tail
    else:
        assert answer_of(pool.run(job("answer"), 30)).peak_bytes == first.peak_bytes


def test_closing_all_descriptors_is_named_and_writes_into_no_file(
    pool: Pool, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    failed = failure_of(pool.run(job("close_all", str(victim)), 30))
    assert failed.reason == "the script closed the worker's control channel"
    assert victim.read_bytes() == b""
    answer_of(pool.run(job("answer"), 30))


@pytest.mark.parametrize("function", ["fork_and_return", "fork_and_raise"])
def test_a_forked_copy_does_not_answer(pool: Pool, function: str) -> None:
    for _ in range(3):
        first = answer_of(pool.run(job(function), 30))
        assert answer_of(pool.run(job("answer"), 30)).peak_bytes == first.peak_bytes


def test_odd_habits_are_survived(pool: Pool) -> None:
    first = answer_of(pool.run(job("odd_habits"), 30))
    again = answer_of(pool.run(job("sleep", "1.2"), 30))
    assert again.peak_bytes == first.peak_bytes


def test_signals_to_its_own_group_do_not_reach_the_guardian(pool: Pool) -> None:
    result = pool.run(job("kill_group", str(int(signal.SIGTERM))), 30)
    assert answer_of(result).fingerprint == "survived"


def test_a_worker_that_dies_between_jobs_costs_the_next_job_nothing(pool: Pool) -> None:
    first = answer_of(pool.run(job("die_later"), 30))
    time.sleep(0.6)
    assert answer_of(pool.run(job("answer"), 30)).peak_bytes != first.peak_bytes
