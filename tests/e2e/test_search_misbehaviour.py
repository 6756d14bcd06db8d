"""Build functions that crash, hang, allocate, print and exit, in one search that finds a mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import automesh
from automesh.worker.pool import Pool
from benchmarks.support.search_process import SearchProcess
from tests.support.paths import SCRIPTS
from tests.support.worker_jobs import MEBIBYTE, surroundings

SCRIPT = SCRIPTS / "misbehaving.py"
TIMEOUT_S = 20  # also of the healthy ones, jax's import included
HABITS = (
    "healthy spoils raises exits garbage segfaults hangs allocates prints aborts closes replaces "
    "forks aborts_when_run"
)
# Those that end a process at every landing, all of them where there is time.
SOME = [
    "healthy spoils raises segfaults forks aborts_when_run",
    pytest.param(HABITS, marks=pytest.mark.long),
]
# Kind of the outcome, stage, and what the reason must say.
FAILURES = {
    "aborts": ("failed", "build", "killed by SIGABRT while building the step"),
    "segfaults": ("failed", "build", "killed by SIGSEGV while building the step"),
    "hangs": ("timed_out", "build", f"timed out after {TIMEOUT_S} s while building"),
    "allocates": ("out_of_memory", "build", "memory"),
    "exits": ("failed", "build", "the script called sys.exit(0)"),
    "garbage": ("failed", "build", "`build` returned a"),
    "aborts_when_run": ("failed", "materialize", "killed by SIGABRT while making the arguments"),
}


def search(folder: Path, habits: str) -> tuple[SearchProcess, int]:
    """Searches the script over these habits and waits for the end."""
    space = folder / "space.toml"
    space.write_text(f"[axes]\ndp = {{}}\n[knobs]\nhabit = {json.dumps(habits.split())}\n")
    options = {
        "--target": "cpu:2",
        "--space": str(space),
        "--top": "3",
        "--timeout": f"{TIMEOUT_S}s",
        "--worker-memory": "1500MiB",
        "--budget": "2m",
        "--results": str(folder / "results"),
        "--rules": str(folder / "mesh_rules.toml"),
    }
    pairs = [part for pair in options.items() for part in pair]
    process = SearchProcess([str(SCRIPT), *pairs], folder)
    return process, process.finish(600)


def show(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "automesh", "show", "--results", str(folder / "results")]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("habits", SOME)
def test_a_search_survives_every_habit(habits: str, tmp_path: Path) -> None:
    process, code = search(tmp_path, habits)
    assert code == 0, process.words
    left, _ = process.survivors(2.0)
    assert not left, [one.cmdline() for one in left]

    shown = json.loads(show(tmp_path, "--json"))
    found: dict[str, dict[str, Any]] = {one["knobs"]["habit"]: one for one in shown["candidates"]}
    # What `build` refuses is ruled out, with what it says and where, before anything is compiled.
    refused = set(habits.split()) - set(found)
    assert refused == {"raises"}
    (rule,) = shown["funnel"]["ruled_out"]
    assert rule["rule"].startswith("ValueError at ") and rule["count"] == 1
    assert any("there is no such layer" in notice for notice in shown["notices"])
    failures = {habit: FAILURES[habit] for habit in found if habit in FAILURES}
    for habit, (kind, stage, reason) in failures.items():
        outcome = found[habit]["outcome"]
        assert (outcome["kind"], outcome["stage"]) == (kind, stage), outcome
        assert reason in json.dumps([outcome, found[habit]["reason"]]), outcome
        assert found[habit]["reason"], habit
    for habit in set(found) - set(FAILURES) - {"spoils"}:
        assert found[habit]["outcome"]["kind"] in ("compiled", "measured"), found[habit]
    # To measure it, its own `build` is called again in the process that it has spoiled.
    if "spoils" in found:
        spoils = found["spoils"]["outcome"]
        assert spoils["kind"] == "compiled" or spoils["stage"] == "materialize", spoils
    assert {found[habit]["outcome"]["kind"] for habit in ("healthy", "forks")} == {"measured"}
    assert shown["funnel"]["waiting"] == 0

    best = shown["best"]
    assert best["evidence"] == "measured"
    config = automesh.load(tmp_path / "mesh_rules.toml").select("cpu-2")
    assert config.knobs["habit"] in ("healthy", "forks")
    assert f"habit={config.knobs['habit']}" in best["plan"]

    table = show(tmp_path, "--top", "20")
    for habit in failures:
        assert f"habit={habit}" in table, table
    logs = list((tmp_path / "results").glob("*/logs/*"))
    assert logs
    assert max(log.stat().st_size for log in logs) < 5 * MEBIBYTE


@pytest.mark.long
def test_nothing_feasible_is_exit_code_one(tmp_path: Path) -> None:
    process, code = search(tmp_path, "raises exits")
    assert code == 1, process.words
    assert "no plan could be measured" in process.words
    assert "Traceback" not in process.words
    assert not (tmp_path / "mesh_rules.toml").exists()
    assert not process.survivors(2.0)[0]


def test_logs_of_earlier_runs_do_not_pile_up(tmp_path: Path) -> None:
    for number in range(100):
        log = tmp_path / f"worker-{number}-0001.log"
        log.touch()
        os.utime(log, (number, number))
    (tmp_path / "notes.txt").touch()
    with Pool(
        size=1, surroundings=surroundings(), log_dir=tmp_path, memory_limit_bytes=100 * MEBIBYTE
    ):
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"worker-{number}-0001.log" for number in range(36, 100)} | {"notes.txt"}
