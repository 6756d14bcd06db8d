"""Ctrl-C before anything is measured: the table of what is known, and the same command goes on."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import automesh
from automesh.outcomes import Estimated
from automesh.report.progress import Silent
from automesh.report.so_far import SoFar
from benchmarks.kill_resume import SCRIPT
from benchmarks.support.search_process import SearchProcess

SPACE = "[axes]\ndp = {}\ntp = {}\n[knobs]\nlayers = [1, 2, 3, 4]\n"
LIMIT_S = 300.0


class StopAtTheFirstTable(Silent):
    """Presses Ctrl-C as soon as a plan is ranked."""

    def ranking(self, so_far: SoFar) -> None:
        raise KeyboardInterrupt


def written(folder: Path) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "space.toml").write_text(SPACE)
    return folder / "train.py"


def test_a_search_that_is_stopped_at_its_first_table_ends_with_it(tmp_path: Path) -> None:
    found = automesh.search(
        written(tmp_path),
        target="cpu:2",
        space=tmp_path / "space.toml",
        results=tmp_path / "results",
        progress=StopAtTheFirstTable(),
    )
    assert found.interrupted
    ranked = [one for one in found.found.candidates if isinstance(one.outcome, Estimated)]
    assert ranked and found.found.footer.stop_reason == "interrupted"
    assert str(ranked[0].plan) in found.table() and "estimated" in found.table()
    assert "not estimated yet" in unwrapped(found.table())
    assert found.found.funnel.compiled == 0
    (study,) = (tmp_path / "results").glob("train-*")
    shown = automesh.show(study)
    assert [one.plan for one in shown.found.candidates] == [
        one.plan for one in found.found.candidates
    ]
    assert shown.interrupted and (study / "estimates.csv").is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that somebody has stopped, or not."""

    code: int
    printed: str
    said: str

    @property
    def is_ranked(self) -> bool:
        return "first ranked: " in self.said

    @property
    def estimated(self) -> int:
        """How many plans have an estimate, by its table."""
        found = re.search(r"(\d+) estimated only", self.printed)
        return int(found[1]) if found else 0

    @property
    def table(self) -> str:
        """What does not depend on where the files are."""
        return self.printed.partition("\nsaved")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """When a search is stopped, and how.

    Attributes:
      after: the start of the line that is waited for: before the first one Python itself starts.
      wait_s: seconds after that.
    """

    signal: signal.Signals
    after: str
    wait_s: float


def run(folder: Path, results: str, blow: Blow | None = None, *, is_dry: bool = True) -> Ended:
    words = [*("train.py", "--target", "cpu:4", "--space", "space.toml", "--results", results)]
    search = SearchProcess([*words, "--dry-run"] if is_dry else words, folder)
    if blow is not None:
        search.wait_for(blow.after, LIMIT_S)
        time.sleep(blow.wait_s)
        if not search.has_ended:
            subprocess.run(["kill", f"-{blow.signal.name[3:]}", str(search.pid)], check=True)
    code = search.finish(LIMIT_S)
    assert not search.survivors(10.0)[0]
    return Ended(code=code, printed=search.printed, said=search.words)


@pytest.mark.long
@pytest.mark.parametrize(("is_dry", "interrupts"), [(True, 20), (False, 5)])
def test_interrupts_at_random_moments(tmp_path: Path, is_dry: bool, interrupts: int) -> None:
    """Each prints what is known, and the same command ends with the table of an undisturbed one."""
    written(tmp_path)
    luck = random.Random(interrupts)
    begun_s = time.monotonic()
    whole = run(tmp_path, "whole")
    whole_s = time.monotonic() - begun_s
    assert whole.code == 0 and whole.estimated == 12
    results, tables, stopped = "", 0, 0
    for number in range(interrupts):
        results = f"results-{number}" if number % 2 == 0 else results
        before = kept(tmp_path / results)
        blow = Blow(
            signal=signal.SIGTERM if number % 3 == 2 else signal.SIGINT,
            after=("... ", "enumerate", "first ranked: ")[number % 3 if is_dry else 2],
            wait_s=luck.uniform(0.0, (0.7, 0.15, 0.03)[number % 3]) * whole_s if is_dry else 0.0,
        )
        ended = run(tmp_path, results, blow, is_dry=is_dry)
        assert "Traceback" not in ended.said, ended.said
        assert before <= kept(tmp_path / results)
        if is_dry and ended.table == whole.table:  # It was over before.
            assert ended.code in (0, -blow.signal)
            continue
        stopped += 1
        assert ended.code == 128 + blow.signal, (blow, ended)
        assert "the same command goes on" in ended.said
        tables += ended.is_ranked
        if ended.is_ranked:
            assert "interrupted" in ended.printed and "step time" in ended.printed, (blow, ended)
            is_told = "not estimated yet" in unwrapped(ended.printed)
            assert ended.estimated == 12 or is_told, (blow, ended)
    assert stopped >= tables > 0
    again = run(tmp_path, results)
    assert again.code == 0 and again.table == whole.table


def unwrapped(text: str) -> str:
    """The text in one line, as a narrow terminal may break it anywhere."""
    return " ".join(text.split())


def kept(results: Path) -> set[str]:
    return {path.name for path in results.glob("*/terms/*.json")}
