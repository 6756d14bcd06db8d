"""Searches killed at random moments: the benchmark's own loop, with fewer kills."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import time
import uuid
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from automesh.tuner.study.storage import Storage, parse_storage
from automesh.tuner.study.study import open_study
from automesh.worker.pool import Pool
from benchmarks.kill_resume import GO_ON, STALE_S, Place, Report, StudyOfKills, kill_and_resume
from benchmarks.support.search_process import MARK, marked
from tests.support.samples.storage_cases import compiled, plans
from tests.support.worker_jobs import MEBIBYTE, job, surroundings


@pytest.mark.long
def test_killed_searches_go_on_where_they_were(tmp_path: Path) -> None:
    report = kill_and_resume(3, seed=4, folder=tmp_path)
    assert report.faults == []
    assert report.kills == 3
    assert report.finished_trials > 0
    counts = (report.lost, report.repeated, report.orphans, report.torn_files, report.incomplete)
    assert counts == (0, 0, 0, 0, 0)
    assert report.rerun_new_trials == 0
    assert 0 < report.longest_start_s < STALE_S


def test_the_checks_notice_what_is_wrong(tmp_path: Path) -> None:
    name = "train-cpu-4-1234"
    storage = parse_storage("", tmp_path / name)
    with open_study(storage, name) as study:
        assert study.lead()
        study.compile.enqueue(plans(3))
        while (trial := study.compile.claim()) is not None:
            study.compile.finish(trial, compiled(0.1))
    place = Place(folder=tmp_path, results=tmp_path)
    watch = StudyOfKills(place=place, report=Report(), luck=Random(0), kills=0)
    watch.check_study()
    assert (watch.report.finished_trials, watch.report.faults) == (3, [])

    _change(storage, "UPDATE trial_values SET value = 0.2 WHERE trial_id = 1")
    watch.check_study()
    assert (watch.report.lost, watch.report.repeated) == (1, 0)
    _change(storage, "DELETE FROM trials WHERE trial_id = 2")
    watch.check_study()
    assert (watch.report.lost, watch.report.repeated) == (2, 0)
    # The third trial tries the first one's plan.
    plan = "(SELECT value_json FROM trial_user_attributes WHERE trial_id = 1 AND key = 'plan_json')"
    _change(
        storage,
        f"UPDATE trial_user_attributes SET value_json = {plan} "
        "WHERE trial_id = 3 AND key = 'plan_json'",
    )
    watch.check_study()
    assert watch.report.repeated == 1
    assert watch.report.torn_files == 0
    Path(storage.location).write_bytes(b"SQLite format 3\0 and no more")
    place.rules.write_text("[[rule]")
    watch.check_study()
    assert watch.report.torn_files == 2


def _change(storage: Storage, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(storage.location)) as database, database:
        assert database.execute(statement).rowcount == 1


def test_a_process_left_behind_is_found(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(["sleep", "1000"], env={"PATH": os.environ["PATH"], MARK: mark})
    try:
        # Until the new process has its own environment it has that of this one.
        end_s = time.monotonic() + 300
        while not (found := [one.pid for one in marked(mark)]) and time.monotonic() < end_s:
            time.sleep(0.01)
        assert found == [process.pid]
    finally:
        process.kill()
        process.wait()
    assert marked(mark) == []


@pytest.mark.parametrize(
    ("jobs", "doubtful"),
    [
        (["abort"], False),
        (["answer", "abort"], True),  # What it did before may have been its end.
        (["suicide"], True),  # Who sent the SIGKILL is not known.
        (["raises"], False),
        (["answer", "raises"], False),
    ],
)
def test_a_job_is_not_blamed_for_what_others_may_have_done(
    tmp_path: Path, jobs: list[str], doubtful: bool
) -> None:
    with Pool(
        size=1,
        surroundings=surroundings(),
        log_dir=tmp_path,
        memory_limit_bytes=400 * MEBIBYTE,
        handler="tests.support.handlers.misbehaving",
    ) as pool:
        for function in jobs:
            pool.submit(job(function), 30)
        finished = [done for _ in jobs for done in pool.wait(30)]
    assert [one.doubtful for one in finished] == [False] * (len(jobs) - 1) + [doubtful]


@pytest.mark.parametrize("size", [1, 2])
def test_a_job_that_must_be_the_first_of_its_process_is(tmp_path: Path, size: int) -> None:
    with Pool(
        size=size,
        surroundings=surroundings(),
        log_dir=tmp_path,
        memory_limit_bytes=400 * MEBIBYTE,
        handler="tests.support.handlers.misbehaving",
    ) as pool:
        for _ in range(3):
            pool.run(job("answer"), 30)
        ticket = pool.submit(job("abort"), 30, fresh=True)
        finished = pool.wait(30)
        assert [(one.ticket, one.doubtful) for one in finished] == [(ticket, False)]
        # It waits for the end of another only if there is no place beside it.
        pool.run(job("answer"), 30)
        pool.submit(job("abort"), 30, fresh=True)
        assert [one.doubtful for one in pool.wait(30)] == [False]


class Ended:
    """A search that has ended by itself, with these words."""

    def __init__(self, code: int, words: str) -> None:
        self.code, self.words = code, words
        self.said = [(0.0, line) for line in words.splitlines()]
        self.mark, self.has_ended = uuid.uuid4().hex, True

    def finish(self, _: float) -> int:
        return self.code

    def said_at_s(self, _: str) -> None:
        return None

    def survivors(self, _: float) -> tuple[list[Any], float]:
        return [], 0.0


@pytest.mark.parametrize(
    ("code", "words", "starts", "left", "faults"),
    [
        (1, f"error: undecided: dp:4\nhint: {GO_ON[1]} again: it goes on", 2, 1, 0),
        (1, f"error: no plan could be measured\nhint: {GO_ON[0]}", 2, 1, 0),
        (1, "error: no plan could be measured", 1, 0, 3),
        (1, "error: no plan could be measured\nhint: look at the log", 1, 0, 3),
        (2, f"error: undecided: dp:4\nhint: {GO_ON[0]}", 1, 0, 3),
    ],
)
def test_a_search_without_a_winner_on_a_busy_machine_is_no_fault(
    tmp_path: Path, code: int, words: str, starts: int, left: int, faults: int
) -> None:
    """Nothing is lost by it, and the same command goes on; all other ends are faults."""
    place: Any = SimpleNamespace(
        results=tmp_path,
        study=tmp_path,
        rules=tmp_path / "rules",
        start=lambda: Ended(code, words),
    )
    watch = StudyOfKills(place=place, report=Report(), luck=Random(0), kills=0)
    watch.run()
    found = watch.report
    assert (found.starts, found.left_undecided, len(found.faults)) == (starts, left, faults)
    assert found.undecided == (starts if left else 0)
