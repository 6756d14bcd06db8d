"""The script changes between two runs: what is kept, what is taken over, what is done anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import automesh
from automesh.outcomes import Compiled
from automesh.report.progress import Silent
from automesh.report.result import SearchResult
from automesh.tuner.study.metadata import Notebook
from automesh.tuner.study.storage import Storage, parse_storage
from automesh.tuner.study.study import Trial, open_study
from benchmarks.kill_resume import SCRIPT

pytest_plugins = ("tests.support.storage_fixtures",)

PLANS = 2


class StopBeforeMeasuring(Silent):
    """Presses Ctrl-C when the compile rung is done."""

    def phase(
        self,
        name: str,
        *,
        total: int,
        done: int = 0,
        note: str = "",
        took_s: float = 0.0,
        lanes: int = 1,
    ) -> None:
        if name == "measure":
            raise KeyboardInterrupt


def run(folder: Path, *, stop: bool) -> SearchResult:
    found = automesh.search(
        folder / "train.py",
        target="cpu:2",
        space=folder / "space.toml",
        budget="1m",
        results=folder / "results",
        progress=StopBeforeMeasuring() if stop else Silent(),
    )
    assert found.interrupted == stop
    return found.found


def trials(folder: Path) -> tuple[list[Trial], list[Trial]]:
    (study,) = (folder / "results").glob("train-*")
    with open_study(parse_storage("", study), study.name, create=False) as opened:
        return opened.compile.trials(), opened.measure.trials()


def outcomes(found: list[Trial]) -> list[Compiled]:
    return [one.outcome for one in found if isinstance(one.outcome, Compiled)]


@pytest.mark.slow
@pytest.mark.long
def test_trials_of_an_older_script_are_kept_but_never_ranked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (tmp_path / "space.toml").write_text("[axes]\ndp = {}\ntp = {}\n")
    first = run(tmp_path, stop=False)
    assert first.verifications
    compiled, measured = trials(tmp_path)
    assert len(compiled) == len(measured) == PLANS
    assert all(one.compile_s > 0 for one in outcomes(compiled))

    # Another text, the same program: what was measured holds.
    script.write_text(SCRIPT + "# a comment\n")
    commented = run(tmp_path, stop=False)
    assert trials(tmp_path) == (compiled, measured)
    assert commented.verifications == first.verifications
    assert any("train.py` has changed since" in one for one in commented.notices)
    assert any("figures hold" in one for one in commented.notices)

    # Another program: compiled anew.
    script.write_text(SCRIPT.replace("0.01", "0.02"))
    changed = run(tmp_path, stop=True)
    after_change, after_measured = trials(tmp_path)
    assert after_change[:PLANS] == compiled
    new = after_change[PLANS:]
    assert len(new) == PLANS
    assert all(one.compile_s > 0 and not one.same_as for one in outcomes(new))
    assert {one.fingerprint for one in new}.isdisjoint(one.fingerprint for one in compiled)
    assert {one.plan for one in changed.candidates} == {one.plan for one in new}
    assert all(isinstance(one.outcome, Compiled) for one in changed.candidates)
    assert _says_stale(changed, PLANS)
    assert any("the step is another program" in one for one in changed.notices)
    finished = [one for one in after_measured if not one.is_open]
    assert finished == measured

    # The change is taken back: everything is known, the decision too.
    script.write_text(SCRIPT)
    back = run(tmp_path, stop=False)
    assert back.verifications == first.verifications
    assert [one.plan for one in back.candidates] == [one.plan for one in first.candidates]
    last_compiled, last_measured = trials(tmp_path)
    assert last_compiled == after_change
    assert [one for one in last_measured if not one.is_open] == measured

    # All is measured and nothing decided, as when a winner fails in its confirmation: once more.
    _forget_decision(tmp_path, source_hash=compiled[0].source_hash)
    assert run(tmp_path, stop=False).verifications
    assert trials(tmp_path) == (last_compiled, last_measured)


def _forget_decision(folder: Path, *, source_hash: str) -> None:
    (study,) = (folder / "results").glob("train-*")
    with open_study(parse_storage("", study), study.name, create=False) as opened:
        name = f"decision.{source_hash}"
        assert opened.noted(name)
        opened.note(name, None)


def _says_stale(result: SearchResult, count: int) -> bool:
    return f"{count} trials of an older script kept, not ranked" in result.notices


@pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
def test_each_script_has_its_own_notes(storage: Storage) -> None:
    versions = (("jax", "0.10.2"),)
    with open_study(storage, "train-cpu-2-1234") as study:
        old = Notebook(study=study, source_hash="old", versions=versions)
        new = Notebook(study=study, source_hash="new", versions=versions)
        other = Notebook(study=study, source_hash="old", versions=(("jax", "0.11.0"),))
        old.note_reference("the step on one device")
        new.note_reference("the baseline dp:8")
        assert old.reference() == "the step on one device"
        assert new.reference() == "the baseline dp:8"
        assert other.reference() == ""
