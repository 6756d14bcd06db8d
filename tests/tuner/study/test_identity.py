"""The name of a study: the same inputs, the same one, wherever a bundle lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from automesh.program.nouns import Entry
from automesh.tuner.study.identity import study_name, submission_in


def name(script: Path, results: Path, bundle: str = "", *argv: str) -> str:
    entry = Entry(kind="script", location=str(script.resolve()), function="build", argv=argv)
    return study_name(
        entry, selector="cpu-8", axes=("dp", "tp"), scope=results, figures="", bundle=bundle
    )


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """One bundle in the folders of two hosts; the second is reached by a link."""
    for host in ("one", "two"):
        (tmp_path / host / "bundle").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "two")
    return tmp_path / "one" / "bundle", link / "bundle"


def test_without_a_bundle_the_path_counts(two: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = (name(one / "train.py", tmp_path / "results") for one in two)
    assert first != second
    assert first == name(two[0] / "train.py", tmp_path / "elsewhere")
    for broken in ("", ":", "word", "word:", ":/", f":{two[0]}"):
        assert name(two[0] / "train.py", tmp_path, broken) == first


def test_a_bundle_is_the_same_one_in_every_folder(two: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = two
    found = name(first / "train.py", tmp_path, f"0123:{first}")
    assert found.startswith("train-cpu-8-")
    assert found == name(second / "train.py", tmp_path, f"0123:{second}")
    others = {
        name(first / "train.py", tmp_path),
        name(first / "train.py", tmp_path, f"4567:{first}"),
        name(first / "train.py", tmp_path, f"0123:{first}", "--layers=2"),
        name(first / "inner" / "train.py", tmp_path, f"0123:{first}"),
        # Beside the bundle, also where the name of its folder is the beginning of another one.
        name(tmp_path / "one" / "bundle2" / "train.py", tmp_path, f"0123:{first}"),
    }
    assert len(others) == 5 and found not in others


def test_the_number_of_a_submission_is_in_the_name(two: tuple[Path, Path], tmp_path: Path) -> None:
    number, script = "0123456789abcdef", two[0] / "train.py"
    bundle = f"{number}:{two[0]}"
    found = name(script, tmp_path / "results", bundle)
    assert found.startswith(f"train-cpu-8-{number}-")
    assert submission_in(found) == number
    # One that was begun before names had the number is gone on with.
    former = f"train-cpu-8-{found.rpartition('-')[2]}"
    (tmp_path / "results" / former).mkdir(parents=True)
    assert name(script, tmp_path / "results", bundle) == former
    assert submission_in(former) == ""


def test_a_study_that_is_known_by_its_path_is_gone_on_with(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    """It was begun before bundles had words; one with the word comes first."""
    results = tmp_path / "results"
    bundle, script = f"0123:{two[0]}", two[0] / "train.py"
    new, former = name(script, results, bundle), name(script, results)
    (results / former).mkdir(parents=True)
    assert name(script, results, bundle) == former
    (results / new).mkdir()
    assert name(script, results, bundle) == new
