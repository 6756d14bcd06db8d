"""Searches for absent devices killed at random moments repeat no finished compile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

import automesh
from automesh.tuner.study.storage import parse_storage
from automesh.tuner.study.study import open_study
from tests.support.fakes.absent_search import TARGET, folder_for_search
from tests.support.handlers.absent import JOURNAL, SECONDS
from tests.support.worker_jobs import ROOT

KILLS = 4
LIMIT_S = 240.0


def command(folder: Path) -> subprocess.Popen[bytes]:
    variables = {
        "PYTHONPATH": ROOT,
        "AUTOMESH_CACHE": str(folder / "cache"),
        JOURNAL: str(folder / "journal"),
        SECONDS: "0.7",
    }
    arguments = f"search train.py --target {TARGET} --space space.toml --budget 60s"
    with (folder / "stderr").open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.fakes.absent_search", *arguments.split()],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def journal(folder: Path) -> Counter[str]:
    path = folder / "journal"
    return Counter(path.read_text().splitlines() if path.exists() else [])


def kill_while_compiling(folder: Path, dice: Random) -> None:
    """Starts the search, and kills it some time after its next compile has begun."""
    before = sum(journal(folder).values())
    process = command(folder)
    end_s = time.monotonic() + LIMIT_S
    while sum(journal(folder).values()) == before and process.poll() is None:
        assert time.monotonic() < end_s, "no compile was begun"
        time.sleep(0.02)
    time.sleep(dice.uniform(0, 1.5))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.long
def test_a_killed_search_repeats_no_finished_compile(tmp_path: Path) -> None:
    folder, dice = folder_for_search(tmp_path), Random(7)
    for _ in range(KILLS):
        kill_while_compiling(folder, dice)
    last = command(folder)
    assert last.wait(LIMIT_S) == 0, (folder / "stderr").read_text()
    lines = journal(folder)
    ends = {line: times for line, times in lines.items() if line.startswith("end")}
    assert len(ends) == 6  # three plans that fit, at two efforts
    assert set(ends.values()) == {1}
    rules = automesh.load(folder / "mesh_rules.toml")
    assert rules.select("v5e-2x4").evidence.kind == "compiled"
    (study,) = folder.glob("results/train-v5e-2x4-*")
    with open_study(parse_storage("", study), study.name, create=False) as opened:
        for rung in (opened.screen, opened.compile):
            plans = [trial.plan for trial in rung.trials()]
            assert len(plans) == len(set(plans))
            assert not any(trial.is_open for trial in rung.trials())
