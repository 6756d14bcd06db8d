"""Searches killed at random moments: the benchmark's own loop, with fewer kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kill_resume import STALE_S, kill_and_resume


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
