"""A search by a command, killed with SIGKILL at random moments and resumed by the same command.

The program keeps a list of its own runs: when one begins, and when it has told as many steps as a
run needs. By that list, and not by the study, no complete run may be repeated, and none be lost.
"""

from __future__ import annotations

import json
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from automesh.outcomes import Measured
from automesh.tuner.study.study import open_study, parse_storage
from benchmarks.support.search_process import SearchProcess, end_processes
from tests.support.paths import SCRIPTS

FLAGS = SCRIPTS / "flags.py"
SKIP, STEPS = 2, 8
SOURCES = {
    "printed": ("regex:loss (?P<loss>[0-9.]+), (?P<ms>[0-9.]+) ms", ""),
    "shared file": ("jsonl:metrics.jsonl", "--metrics metrics.jsonl"),
    "own file": ("jsonl:{run_dir}/metrics.jsonl", "--metrics {run_dir}/metrics.jsonl"),
}
ORPHAN_LIMIT_S = 3.0
WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a search by a command happens."""

    folder: Path
    source: str

    def start(self) -> SearchProcess:
        step_time, words = SOURCES[self.source]
        command = (
            f"{shlex.quote(sys.executable)} train.py --fsdp {{fsdp}} --tp {{tp}} --runs runs "
            f"--enough {SKIP + STEPS} --sleep 0.02 --wrong raise:4 {words}"
        )
        options = {
            "--command": command,
            "--step-time": step_time,
            "--skip-steps": str(SKIP),
            "--timed-steps": str(STEPS),
            "--target": "cpu:8",
            "--baseline": "tp:8",
            "--budget": "5m",
            "--top": "2",
        }
        pairs = [part for pair in options.items() for part in pair]
        return SearchProcess([*pairs, "--json"], self.folder)

    def events(self) -> list[list[str]]:
        """Event, name of the run, mesh and process of every line that the program wrote."""
        file = self.folder / "runs"
        text = file.read_text() if file.exists() else ""
        return [line.split() for line in text.splitlines()]


def trial_of(run: str) -> str:
    """`run-0007-2` is the second attempt of the trial 7."""
    return "-".join(run.split("-")[:2])


def kill_and_resume(place: Place, *, kills: int, seed: int) -> int:
    """Kills searches until there were so many kills or one has ended; gives the kills."""
    luck, done = random.Random(seed), 0
    while True:
        search = place.start()
        if done < kills:
            # While it starts, while it runs something, or between two runs.
            search.wait_for("enumerate", WAIT_S)
            end_s = time.monotonic() + luck.uniform(0.0, 4.0)
            while time.monotonic() < end_s and not search.has_ended:
                time.sleep(0.005)
        if done < kills and not search.has_ended:
            search.kill()
            done += 1
            check_nobody_left(search)
            continue
        assert search.finish(WAIT_S) == 0, search.words
        check_nobody_left(search)
        return done


def check_nobody_left(search: SearchProcess) -> None:
    left, _ = search.survivors(ORPHAN_LIMIT_S)
    words = [one.cmdline() for one in left]
    end_processes(left)
    assert not words


def check_runs(place: Place) -> None:
    """No complete run was repeated or lost, by the program's own list."""
    events = place.events()
    complete = Counter(trial_of(run) for event, run, _, _ in events if event == "enough")
    repeated = {trial: count for trial, count in complete.items() if count > 1}
    assert not repeated
    (study,) = (place.folder / "results").glob("train-cpu-8-*")
    with open_study(parse_storage("", study), study.name, create=False) as opened:
        trials = opened.measure.trials()
    # A run that a kill took, and that nothing rests on any more, may wait for ever.
    assert all(trial.state in ("done", "failed") or trial.is_open for trial in trials)
    labels = Counter((trial.plan, trial.run) for trial in trials)
    assert set(labels.values()) == {1}
    measured = {
        f"run-{trial.number:04d}" for trial in trials if isinstance(trial.outcome, Measured)
    }
    # Each complete run is in the study, and what is in the study was run.
    assert set(complete) == measured
    # What fails at once fails once; only a search that was killed in that moment tries again.
    failed = [trial for trial in trials if trial.state == "failed"]
    assert [trial.plan.mesh for trial in failed] == ["fsdp:2,tp:4"]
    # Nothing but logs is left of the runs.
    assert all(path.suffix == ".log" for path in (study / "logs").iterdir())


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "seed"),
    [("printed", 1), ("shared file", 2)],
)
def test_no_run_is_repeated_or_lost(tmp_path: Path, source: str, seed: int) -> None:
    (tmp_path / "train.py").write_text(FLAGS.read_text())
    place = Place(folder=tmp_path, source=source)
    assert kill_and_resume(place, kills=4, seed=seed) >= 3
    check_runs(place)
    # The same command once more: nothing is run.
    before = place.events()
    search = place.start()
    assert search.finish(WAIT_S) == 0
    assert place.events() == before
    assert search.result()["best"]["plan"] == "fsdp:8"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_twenty_kills(tmp_path: Path, seed: int) -> None:
    done = 0
    while done < 20:
        folder = tmp_path / str(done)
        folder.mkdir()
        (folder / "train.py").write_text(FLAGS.read_text())
        source = list(SOURCES)[(seed + done) % len(SOURCES)]
        place = Place(folder=folder, source=source)
        done += kill_and_resume(place, kills=min(7, 20 - done), seed=100 * seed + done)
        check_runs(place)


def test_the_check_notices_a_run_that_is_repeated(tmp_path: Path) -> None:
    place = Place(folder=tmp_path, source="printed")
    lines = ["begin run-0000 8x1 1", "enough run-0000 8x1 1", "begin run-0000-2 8x1 2"]
    (tmp_path / "runs").write_text("\n".join([*lines, "enough run-0000-2 8x1 2\n"]))
    with pytest.raises(AssertionError):
        check_runs(place)


@pytest.mark.long
def test_two_searches_at_once_share_the_runs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FLAGS.read_text())
    place = Place(folder=tmp_path, source="printed")
    searches = [place.start(), place.start()]
    assert [search.finish(WAIT_S) for search in searches] == [0, 0]
    check_runs(place)
    first, second = (search.result()["best"] for search in searches)
    assert first == second and first["plan"] == "fsdp:8"
    # Never two at a time: each began after the one before it had told all of its steps.
    events = [event for event, _, mesh, _ in place.events() if mesh != "2x4"]
    assert events == ["begin", "enough"] * (len(events) // 2)


@pytest.mark.slow
def test_ctrl_c_ends_with_the_table_and_the_same_command_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FLAGS.read_text())
    place = Place(folder=tmp_path, source="printed")
    search = place.start()
    deadline = time.monotonic() + WAIT_S
    while len(place.events()) < 6:
        assert time.monotonic() < deadline and not search.has_ended
        time.sleep(0.01)
    subprocess.run(["kill", f"-{int(signal.SIGINT)}", str(search.pid)], check=True)
    assert search.finish(60) == 130
    check_nobody_left(search)
    result = search.result()
    assert result["interrupted"] and result["stop_reason"] == "interrupted"
    assert result["candidates"] and result["funnel"]["measured"] >= 1
    assert "the same command goes on" in search.words
    again = place.start()
    assert again.finish(WAIT_S) == 0
    assert json.dumps(again.result()["best"]) != "null"
    check_runs(place)
