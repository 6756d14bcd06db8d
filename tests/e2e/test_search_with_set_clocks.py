"""Searches while somebody sets the clock of the host by a day: real processes, which all see it.

They end as without it, in their time, and nothing is lost or done twice.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import psutil
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from benchmarks.kill_resume import GO_ON, SCRIPT, SPACE
from benchmarks.support.finished_trials import finished_trials
from tests.support.set_clock import HAS_COMPILER, SetClock

pytestmark = [
    pytest.mark.long,  # Real searches, a minute each.
    pytest.mark.skipif(
        not HAS_COMPILER or sys.platform != "linux", reason="needs Linux and a C compiler, `cc`"
    ),
]

DAY_S = 86_400
LIMIT_S = 900.0
PLANS = 6  # of `SPACE` on four devices
_WORDS = [
    *(sys.executable, "-m", "automesh", "search", "train.py", "--target", "cpu:4"),
    *("--space", "space.toml", "--budget", "4m", "--top", str(PLANS), "--json"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.toml").write_text(SPACE)
    return tmp_path


class Search:
    """A search whose time of day is `clock`; its stderr is a file, to be looked at meanwhile."""

    def __init__(self, folder: Path, clock: SetClock, *more: str, name: str = "search") -> None:
        self.said, self.printed = folder / f"{name}.err", folder / f"{name}.out"
        self.clock = clock
        with self.said.open("wb") as err, self.printed.open("wb") as out:
            self.process = subprocess.Popen(
                [*_WORDS, *more], cwd=folder, env=clock.variables, stdout=out, stderr=err
            )

    def wait_for(self, start: str) -> None:
        """Until it has said a line with this start."""
        until(lambda: self.is_over or f"\n{start}" in self.said.read_text())
        assert not self.is_over, self.said.read_text()

    def wait_for_workers(self) -> None:
        """Until it has a worker, and all that it has started have its clock."""

        def all_have_it() -> bool:
            found = psutil.Process(self.process.pid).children(recursive=True)
            with contextlib.suppress(psutil.Error):  # One has just ended.
                has_worker = any("automesh.worker.child" in one.cmdline() for one in found)
                return has_worker and all(self.clock.is_seen_by(one) for one in found)
            return False

        until(lambda: self.is_over or all_have_it())
        assert not self.is_over, self.said.read_text()

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def result(self) -> dict[str, Any]:
        """What it printed at its end: with a winner, or the words that their times, on a machine
        with other work, name none."""
        code = self.process.wait(LIMIT_S)
        said = self.said.read_text()
        assert code == 0 or (code == 1 and any(f"\nhint: {words}" in said for words in GO_ON)), said
        assert "Traceback" not in said
        return json.loads(self.printed.read_text())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LIMIT_S)


def until(is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def check_done(folder: Path, result: dict[str, Any]) -> None:
    """Every plan was measured, and none waits; where there is a winner, it is the rule."""
    assert result["funnel"]["measured"] == PLANS, result["funnel"]
    assert not result["funnel"]["waiting"], result["funnel"]
    if result["rules_path"]:
        text = (folder / "mesh_rules.toml").read_text()
        (rule,) = tomllib.loads(text)["rule"]
        assert rule["match"] == "cpu-4" and 'kind = "measured"' in text, text


def trials_of(folder: Path) -> dict[tuple[str, int], Any]:
    (database,) = folder.glob("results/*/study.db")
    return finished_trials(database)


def check_once(trials: dict[tuple[str, int], Any]) -> None:
    keys = Counter((rung, record.key) for (rung, _), record in trials.items())
    assert set(keys.values()) == {1}, keys


@pytest.mark.parametrize("first_s", [DAY_S, -DAY_S])
def test_a_clock_that_jumps_under_a_search(folder: Path, first_s: int) -> None:
    """By a day while plans are compiled, by two the other way at the first visits, and back."""
    clock = SetClock(folder / "clock")
    began_s = time.monotonic()
    search = Search(folder, clock)
    for phase, seconds in (("compile ", first_s), ("measure ", -first_s), ("confirm ", 0)):
        search.wait_for(phase)
        search.wait_for_workers()
        clock.set(seconds)
    check_done(folder, search.result())
    assert time.monotonic() - began_s < LIMIT_S
    before = trials_of(folder)
    check_once(before)
    # What is known stays so a day later: all that the same command may add are visits.
    clock.set(first_s)
    check_done(folder, Search(folder, clock).result())
    after = trials_of(folder)
    check_once(after)
    assert {row: after.get(row) for row in before} == before


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S])
def test_a_killed_search_goes_on_at_another_day(folder: Path, jump_s: int) -> None:
    """What was finished stays, whether it seems to be of tomorrow or of long ago."""
    clock = SetClock(folder / "clock")
    search = Search(folder, clock)
    search.wait_for("measure ")
    search.wait_for_workers()
    search.kill()
    before = trials_of(folder)
    assert before
    clock.set(jump_s)
    check_done(folder, Search(folder, clock).result())
    after = trials_of(folder)
    check_once(after)
    assert {row: after.get(row) for row in before} == before


def test_two_hosts_whose_clocks_are_two_days_apart(folder: Path) -> None:
    """They share a journal, as on a network file system: nobody takes the other one's plans."""
    searches: list[Search] = []
    for number, jump_s in enumerate((DAY_S, -DAY_S)):
        clock = SetClock(folder / f"clock{number}")
        clock.set(jump_s)
        more = ("--storage", "shared.journal")
        searches.append(Search(folder, clock, *more, name=f"search{number}"))
    for result in [one.result() for one in searches]:
        check_done(folder, result)
    journal = JournalStorage(JournalFileBackend(str(folder / "shared.journal")))
    for summary in optuna.get_all_study_summaries(journal):
        study = optuna.load_study(study_name=summary.study_name, storage=journal)
        plans = Counter(
            trial.user_attrs["plan_json"] for trial in study.trials if trial.state.is_finished()
        )
        assert len(plans) == PLANS and set(plans.values()) == {1}, plans
