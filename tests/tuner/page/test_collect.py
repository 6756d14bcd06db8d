"""The page of a real study's folder: gathered from what the study keeps, written whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from automesh import api
from automesh.answers import Result
from automesh.errors import UsageError
from tests.support.paths import ROOT
from tests.tuner.explain.test_study import MESHES, make_study


def document(path: Path) -> dict[str, object]:
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return make_study(tmp_path / "train-gpu-h100-16-0")


def test_a_study_of_estimates_alone_has_a_page(study: Path) -> None:
    path = api.write_report(study)
    assert path == study / "report.html"
    page = document(path)
    plans = page["plans"]
    assert isinstance(plans, dict)
    rows = [dict(zip(plans["columns"], row)) for row in plans["rows"]]
    assert {row["mesh"] for row in rows if row["evidence"] == "estimated"} == set(MESHES)
    (missing,) = [row for row in rows if row["evidence"] == "not estimated"]
    assert missing["reason"] == "the time was used up"
    explained = page["explained"]
    assert isinstance(explained, list) and len(explained) == 6
    assert page["verdicts"]
    assert isinstance(page["placements"], list) and len(page["placements"]) == 7
    verdict = page["verdict"]
    assert isinstance(verdict, dict)
    assert "nothing was compiled or measured yet" in verdict["sentence"]


def test_the_result_writes_the_same_page(study: Path, tmp_path: Path) -> None:
    api.write_report(study)
    shown = api.show(study)
    assert isinstance(shown, Result)
    other = shown.report(tmp_path / "mine.html")
    assert other.read_bytes() == (study / "report.html").read_bytes()
    assert "no rule" in shown._repr_html_()


def test_a_study_that_was_shown_is_found_from_anywhere(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its header names the folder as it was seen from where the search ran.
    moved = study.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="there is no study"):
        api.write_report(study)
    monkeypatch.chdir(tmp_path)
    name = study.name
    moved.rename(tmp_path / name)
    shown = api.show(Path(name))
    assert shown.report() == Path(name) / "report.html"


def test_what_cannot_be_read_or_written_is_said(study: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no study"):
        api.write_report(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file"):
        api.write_report(study, tmp_path / "file" / "report.html")


def test_damaged_rows_of_the_estimates_cost_only_themselves(study: Path) -> None:
    table = study / "estimates.csv"
    lines = table.read_text().splitlines()
    lines[1] = lines[1].replace("0.", "zero.")
    lines.append("what is this")
    table.write_text("\n".join(lines) + "\n")
    plans = document(api.write_report(study))["plans"]
    assert isinstance(plans, dict)
    assert len(plans["rows"]) == 6


def test_the_command_writes_a_page_without_jax(study: Path) -> None:
    code = (
        "import sys; from automesh.cli.app import main\n"
        f"sys.argv = ['automesh', 'report', {str(study)!r}]\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "assert not {'jax', 'jaxlib'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{study / 'report.html'}\n"
