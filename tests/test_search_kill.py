"""Searches killed at random moments: the benchmark's own loop, with fewer kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from automesh.worker.pool import Pool
from benchmarks.kill_resume import STALE_S, kill_and_resume
from tests.worker_help import MEBIBYTE, job, surroundings


@pytest.mark.slow
def test_killed_searches_go_on_where_they_were(tmp_path: Path) -> None:
    report = kill_and_resume(5, seed=4, folder=tmp_path)
    assert report.faults == []
    assert report.kills == 5
    assert report.finished_trials > 0
    counts = (report.lost, report.repeated, report.orphans, report.torn_files, report.incomplete)
    assert counts == (0, 0, 0, 0, 0)
    assert report.rerun_new_trials == 0
    assert 0 < report.longest_start_s < STALE_S


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
        handler="tests.worker_handlers",
    ) as pool:
        for function in jobs:
            pool.submit(job(function), 30)
        finished = [done for _ in jobs for done in pool.wait(30)]
    assert [one.doubtful for one in finished] == [False] * (len(jobs) - 1) + [doubtful]
