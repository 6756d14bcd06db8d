"""Ctrl-C before anything is measured: the table of what is known, and the same command goes on."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import automesh
from automesh.outcomes import Estimated
from automesh.report.progress import Silent
from automesh.report.so_far import SoFar
from benchmarks.kill_resume import SCRIPT
from tests.support.paths import ROOT

INTERRUPTS = 20


class StopAtTheFirstTable(Silent):
    """Presses Ctrl-C as soon as a plan is ranked."""

    def ranking(self, so_far: SoFar) -> None:
        raise KeyboardInterrupt


def test_a_search_that_is_stopped_at_its_first_table_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "space.toml").write_text("[axes]\ndp = {}\ntp = {}\n")
    found = automesh.search(
        script,
        target="cpu:2",
        space=tmp_path / "space.toml",
        results=tmp_path / "results",
        progress=StopAtTheFirstTable(),
    )
    assert found.interrupted
    ranked = [one for one in found.found.candidates if isinstance(one.outcome, Estimated)]
    assert ranked and found.found.stop_reason == "interrupted"
    assert str(ranked[0].plan) in found.table() and "estimated" in found.table()
    assert found.found.funnel.compiled == 0
    (study,) = (tmp_path / "results").glob("train-*")
    shown = automesh.show(study)
    assert [one.plan for one in shown.found.candidates] == [
        one.plan for one in found.found.candidates
    ]
    assert shown.interrupted and (study / "estimates.csv").is_file()


def command(folder: Path, *, is_dry: bool) -> list[str]:
    script = ROOT / "examples" / "dense_lm.py"
    words = [sys.executable, "-m", "automesh", "search", str(script), "--target", "cpu:8"]
    words += ["--results", str(folder), "--rules", str(folder / "rules.toml")]
    return [*words, "--dry-run"] if is_dry else words


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/terms/*.json")}


@pytest.mark.long
@pytest.mark.parametrize("is_dry", [True, False])
def test_interrupts_at_random_moments(tmp_path: Path, is_dry: bool) -> None:
    """Each prints what is known, and the same command ends with the table of an undisturbed one."""
    luck = random.Random(is_dry)
    begun_s = time.monotonic()
    whole = subprocess.run(
        command(tmp_path / "other", is_dry=True), check=True, capture_output=True, text=True
    )
    whole_s = time.monotonic() - begun_s
    folder, tables = tmp_path, 0
    for number in range(INTERRUPTS if is_dry else 5):
        if number % 4 == 0:
            folder = tmp_path / f"results-{number}"
        before = kept(folder)
        number_of_signal = signal.SIGTERM if number % 3 == 2 else signal.SIGINT
        with subprocess.Popen(
            command(folder, is_dry=is_dry),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        ) as process:
            time.sleep(luck.uniform(0.05, 0.95) * whole_s)
            process.send_signal(number_of_signal)
            table, said = process.communicate(timeout=120)
        assert "Traceback" not in said, said
        if process.returncode == 0 and is_dry:  # It was over before.
            assert table.startswith("dense_lm on cpu-8"), table
            continue
        assert process.returncode == 128 + number_of_signal, said
        assert "the same command goes on" in said
        is_ranked = "first ranked: " in said
        tables += is_ranked
        assert ("interrupted" in table) >= is_ranked, (table, said)
        assert ("step time *" in table) >= is_ranked, (table, said)
        if is_ranked and number_estimated(table) < number_estimated(whole.stdout):
            assert "not estimated yet" in table, table
        assert before <= kept(folder)
    assert tables > 0
    again = subprocess.run(
        command(folder, is_dry=True), check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert estimates(again.stdout) == estimates(whole.stdout)
    assert "interrupted" not in again.stdout


def number_estimated(printed: str) -> int:
    found = re.search(r"(\d+) estimated only", printed)
    return int(found[1]) if found else 0


def estimates(printed: str) -> str:
    """The table of a dry run up to what depends on where its files are."""
    return printed.partition("\nsaved")[0]
