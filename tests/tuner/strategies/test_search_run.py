"""The end of a search, when its rules file was edited meanwhile or nothing can be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import automesh
from automesh import files
from automesh.errors import UsageError
from automesh.mesh.rules.file import read_rules
from automesh.tuner.command import run as command_run
from automesh.worker import process
from tests.tuner.command.test_search import Place, place

__all__ = ["place"]  # A fixture.

HEAD = 'schema = 1\naxes = ["fsdp", "tp"]\n'
BY_HAND = HEAD + "[[rule]]\nmatch = 'cpu-8'\nici = { tp = 8 }  # I know better\n"
# The user saves the file while a run of the search goes on.
SAVES = """
from pathlib import Path
if Path("to_save").exists():
    Path("mesh_rules.toml").write_text(Path("to_save").read_text())
    Path("to_save").unlink()
"""


@pytest.fixture
def saving(place: Place) -> Place:
    """A place in which the first run saves what stands in `to_save` as the rules file."""
    script = place.folder / "train.py"
    head, future, rest = script.read_text().partition("from __future__ import annotations\n")
    script.write_text(head + future + SAVES + rest)
    return place


@pytest.mark.slow
def test_an_edit_of_other_rules_survives_with_the_rule_of_the_search(saving: Place) -> None:
    rules = saving.folder / "mesh_rules.toml"
    other = BY_HAND.replace("cpu-8", "cpu-4").replace("tp = 8", "tp = 4")
    (saving.folder / "to_save").write_text(other)
    result = saving.search()
    assert result.found.footer.rules_path == "mesh_rules.toml"
    assert "# I know better" in rules.read_text()
    assert [rule.match for rule in read_rules(rules).rules] == ["cpu-4", "cpu-8"]


@pytest.mark.slow
def test_an_edit_of_the_rule_itself_stays_and_is_told(saving: Place) -> None:
    rules = saving.folder / "mesh_rules.toml"
    (saving.folder / "to_save").write_text(BY_HAND)
    result = saving.search()
    assert rules.read_text() == BY_HAND
    assert result.found.footer.rules_path == ""
    assert "the rule for cpu-8" in result.found.footer.stop_reason
    assert "was edited while the search ran, and stays" in result.found.footer.stop_reason
    assert result.best.mesh_shape.ici_mesh_shape == (8, 1), "nothing that was measured is lost"
    before = saving.runs()
    again = saving.search()
    assert saving.runs() == before
    assert again.found.footer.rules_path == "mesh_rules.toml"
    assert automesh.load(rules).select("cpu-8").mesh_shape.ici_mesh_shape == (8, 1)


@pytest.mark.slow
def test_an_edit_that_breaks_the_file_stays_and_nothing_found_is_lost(saving: Place) -> None:
    rules = saving.folder / "mesh_rules.toml"
    (saving.folder / "to_save").write_text("axes = [")
    with pytest.raises(UsageError, match=r"mesh_rules\.toml` is not TOML") as caught:
        saving.search()
    assert rules.read_text() == "axes = ["
    assert "what was found is kept" in caught.value.hint
    assert f"`automesh show results/{saving.study.name}` lists it" in caught.value.hint
    assert (saving.study / "trials.csv").read_text().count("measured") == 4
    before = saving.runs()
    rules.write_text(HEAD)
    assert saving.search().found.footer.rules_path == "mesh_rules.toml"
    assert saving.runs() == before


@pytest.mark.slow
def test_a_full_disk_at_each_step_of_a_search(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence each, and the next search goes on where this one was."""
    full = {"name": ""}
    write, make, new = files.write_whole, process.open_log, files.write_new

    def refuse(path: Path) -> None:
        if full["name"] and full["name"] in str(path):
            raise OSError(28, os.strerror(28), str(path))

    def write_whole(path: Path, *content: object, **how: object) -> None:
        refuse(path)
        write(path, *content, **how)  # type: ignore[arg-type]

    def write_new(path: Path, content: str) -> bool:
        refuse(path)
        return new(path, content)

    def open_log(path: Path) -> object:
        refuse(path)
        return make(path)

    monkeypatch.setattr(command_run, "write_whole", write_whole)
    monkeypatch.setattr("automesh.report.files.csv.write_whole", write_whole)
    monkeypatch.setattr(files, "write_new", write_new)
    monkeypatch.setattr(process, "open_log", open_log)
    steps = {
        "mark.json": 0,  # how often programs were begun until then
        "/run-0000": 0,
        "/run-0003": 3,
        "mesh_rules.toml": None,
        "trials.csv": None,
    }
    for name, begun in steps.items():
        full["name"] = name
        with pytest.raises(UsageError, match="no space left on device") as caught:
            place.search()
        assert "\n" not in caught.value.message
        if begun is not None:
            assert sum(place.runs().values()) == begun
    full["name"] = ""
    before = place.runs()
    result = place.search()
    assert place.runs() == before, "nothing is run again"
    assert result.found.footer.rules_path == "mesh_rules.toml"
    assert result.best.mesh_shape.ici_mesh_shape == (8, 1)


@pytest.mark.slow
def test_executables_are_not_kept_among_the_results(place: Place) -> None:
    script = place.folder / "train.py"
    seen = 'import os\nopen("seen", "a").write(os.environ["JAX_COMPILATION_CACHE_DIR"] + "\\n")\n'
    head, future, rest = script.read_text().partition("from __future__ import annotations\n")
    script.write_text(head + future + seen + rest)
    place.search()
    assert not (place.study / "cache").exists()
    (folder,) = set((place.folder / "seen").read_text().splitlines())
    assert Path(folder).is_relative_to(os.environ["AUTOMESH_CACHE"])
    assert Path(folder).stat().st_mode & 0o777 == 0o700
