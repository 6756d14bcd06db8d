"""Studies of the former version, as it has left them: they are read, and show what it showed.

tests/data/former has their files (`NAME.db.gz`), made by real searches: one that measured, one by a
command, a dry run of a script whose shardings are inferred, one for devices that are not here, and
one with findings. `NAME.json.gz` is what `automesh show NAME --json` of that version has printed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from automesh.errors import AutomeshError
from automesh.jsonio import from_json, to_json
from automesh.report.blocks.json import finite
from automesh.report.blocks.terminal import render
from automesh.report.files.json import facts_of
from automesh.report.table import report_of
from automesh.tuner.measure.decision import Decision
from automesh.tuner.run import read_result
from automesh.tuner.study.metadata import Footer, Header, notebook_of, read_header
from automesh.tuner.study.stored.notes import SCHEMA, upgraded_decision, upgraded_header
from automesh.tuner.study.study import open_study, parse_storage
from tests.support.paths import DATA

FORMER = DATA / "former"
NAMES = sorted(path.name.removesuffix(".db.gz") for path in FORMER.glob("*.db.gz"))
MEASURED = next(name for name in NAMES if name.startswith("dense_lm"))


def unpacked(name: str, results: Path) -> Path:
    """The folder of a study, as a search has left it."""
    folder = results / name
    folder.mkdir(parents=True)
    (folder / "study.db").write_bytes(gzip.decompress((FORMER / f"{name}.db.gz").read_bytes()))
    return folder


def was_shown(name: str) -> dict[str, Any]:
    """What its version has shown, and the keys that were added since."""
    shown = json.loads(gzip.decompress((FORMER / f"{name}.json.gz").read_bytes()))
    return {**shown, "data_by_mesh": None}


def noted(folder: Path, key: str) -> dict[str, Any]:
    """A note of a study as it stands in its file."""
    with open_study(parse_storage("", folder), folder.name, create=False) as study:
        return study.noted(key)


def test_there_is_one_of_each_kind() -> None:
    shown = [was_shown(name) for name in NAMES]
    assert len(shown) == 5
    assert any(one["template"] for one in shown)
    assert any(row["outcome"].get("findings") for one in shown for row in one["candidates"])
    assert any(one["verifications"] and not one["template"] for one in shown)
    assert {one["target"].partition("-")[0] for one in shown} == {"cpu", "tpu"}


@pytest.mark.parametrize("name", NAMES)
def test_it_shows_what_its_version_has_shown(name: str, tmp_path: Path) -> None:
    folder = unpacked(name, tmp_path)
    assert "schema" not in noted(folder, "header")
    found = read_result(folder, results=tmp_path, storage="")
    assert json.loads(json.dumps(finite(facts_of(found)))) == was_shown(name)
    assert found.facts.searched.workload in render(report_of(found, top=3), width=100, colour=False)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_noted_again_reads_the_same(name: str, tmp_path: Path) -> None:
    """A search that goes on with the study notes it in the form of now."""
    folder = unpacked(name, tmp_path)
    with open_study(parse_storage("", folder), name, create=False) as study:
        header = read_header(study)
        assert header is not None
        book = notebook_of(study, header)
        decision = book.decision()
    with open_study(parse_storage("", folder), name) as study:
        book = notebook_of(study, header)
        book.note_header(header)
        if decision is not None:
            book.note_decision(decision)
    assert noted(folder, "header")["schema"] == SCHEMA
    again = read_result(folder, results=tmp_path, storage="")
    assert json.loads(json.dumps(finite(facts_of(again)))) == was_shown(name)


def test_a_decision_says_once_how_the_baseline_compares(tmp_path: Path) -> None:
    folder = unpacked(MEASURED, tmp_path)
    with open_study(parse_storage("", folder), MEASURED, create=False) as study:
        header = read_header(study)
        assert header is not None
        decision = notebook_of(study, header).decision()
    assert decision is not None
    gain = decision.verification.gain
    assert gain is not None and gain == dict(decision.comparisons)[header.baseline[0]]
    assert gain.basis == "fresh processes" and gain.processes == decision.verification.processes


def test_a_newer_schema_is_refused() -> None:
    for found in ({"schema": SCHEMA + 1}, {"schema": "2"}):
        for upgraded, kind in ((upgraded_header, Header), (upgraded_decision, Decision)):
            with pytest.raises(AutomeshError):
                from_json(upgraded(found), kind)


def test_a_tie_and_a_loss_of_old_decisions_stay_what_they_were() -> None:
    """Of versions that kept no comparison of the baseline."""
    old = {"processes": 3, "baseline": "dp:8", "speedup": 1.01, "speedup_interval": [0.9, 1.1]}
    tie = upgraded_decision({"comparisons": [], "verification": old | {"is_tie": True}})
    assert tie["verification"]["gain"]["verdict"] == "undecided"
    loss = old | {"speedup": 0.8, "speedup_interval": [0.7, 0.9], "is_tie": False}
    lost = upgraded_decision({"comparisons": [], "verification": loss})
    assert lost["verification"]["gain"]["verdict"] == "faster"
    kept = old | {"speedup": 1.0, "speedup_interval": [1.0, 1.0], "is_tie": False}
    assert (
        "gain" not in upgraded_decision({"comparisons": [], "verification": kept})["verification"]
    )


def test_a_footer_has_the_form_that_it_had() -> None:
    """It was none of what changed: all versions read it."""
    footer = Footer(stop_reason="all were tried", rules_path="", interrupted=False)
    keys = ["stop_reason", "rules_path", "interrupted", "certificate", "belief", "made"]
    assert list(to_json(footer, Footer)) == keys
