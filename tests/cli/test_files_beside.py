"""Files beside a report: refused before the work if they cannot be written; if that shows only at
the end, the report is printed all the same, and so are the other files."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from automesh import api, files
from automesh.__main__ import main
from automesh.answers import Lint
from automesh.errors import UsageError
from automesh.mesh.config import Rules
from automesh.mesh.evidence import ProgramFacts
from automesh.mesh.rules.file import read_rules
from automesh.report.check.nouns import RuleCheck, RulesChecked
from automesh.report.lint.nouns import LintReport
from automesh.tuner.check import rules as checking
from automesh.tuner.check.rules import FiguresNotWritten, write_facts

RULES = 'schema = 1\naxes = ["dp"]\n[[rule]]\nmatch = "cpu-4"\nici = { dp = 4 }\n'
CHECKED = RulesChecked(
    script="train.py",
    against="mesh_rules.toml",
    rules=(RuleCheck(match="cpu-4", status="holds", now=ProgramFacts(fingerprint="0f")),),
)
LINTED = LintReport(
    script="train.py",
    workload="train",
    target="cpu-4",
    device="cpu",
    device_count=4,
    plans=("dp:4",),
    findings=(),
)
COMMANDS = {"--junit": "check", "--markdown": "check", "--sarif": "lint"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mesh_rules.toml").write_text(RULES)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["automesh", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def full_disk(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Lets the files of these names no longer be written."""
    write = files.write_whole

    def refuse(path: Path, content: str | bytes, **options: Any) -> None:
        if path.name in names:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content, **options)

    monkeypatch.setattr(files, "write_whole", refuse)
    monkeypatch.setattr("automesh.report.files.csv.write_whole", refuse)


@pytest.mark.parametrize("option", COMMANDS)
def test_a_place_is_refused_before_the_work(
    folder: Path,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("the script is looked at")

    monkeypatch.setattr(api, COMMANDS[option], work)
    assert run(monkeypatch, COMMANDS[option], "train.py", option, "train.py/x") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "`train.py/x` cannot be written: `train.py` is no folder" in said.err


@pytest.mark.parametrize("option", COMMANDS)
def test_a_disk_that_is_full_at_the_end(
    folder: Path,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(api, "check", lambda *_, **__: CHECKED)
    monkeypatch.setattr(api, "lint", lambda *_, **__: Lint(found=LINTED))
    full_disk(monkeypatch, "lost")
    others = ["--markdown", "kept.md"] if option == "--junit" else []
    code = run(monkeypatch, COMMANDS[option], "train.py", option, "new/lost", *others)
    said = capsys.readouterr()
    assert code == 2
    assert "cpu-4" in said.out
    assert "lost` cannot be written: no space left on device" in said.err
    assert not (folder / "new" / "lost").exists()
    if others:
        assert "cpu-4" in (folder / "kept.md").read_text()


def test_figures_that_the_rules_file_does_not_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(*_: Any) -> RulesChecked:
        # Somebody saves half of the file while the script is compiled.
        (folder / "mesh_rules.toml").write_text(f"{RULES}[[rule\n")
        return CHECKED

    monkeypatch.setattr(checking, "check_rules", compared)
    code = run(monkeypatch, "check", "train.py", "--update", "--markdown", "kept.md")
    said = capsys.readouterr()
    assert code == 2
    assert "cpu-4" in said.out
    assert "mesh_rules.toml" in said.err
    assert "cpu-4" in (folder / "kept.md").read_text()
    assert (folder / "mesh_rules.toml").read_text() == f"{RULES}[[rule\n"


def test_the_error_has_the_result(folder: Path) -> None:
    path = folder / "mesh_rules.toml"
    known: Rules = read_rules(path)
    path.write_text("[[rule\n")
    with pytest.raises(FiguresNotWritten) as lost:
        write_facts(path, known, CHECKED)
    assert lost.value.checked is CHECKED
    assert isinstance(lost.value, UsageError)


def test_an_update_of_rules_that_cannot_be_written_is_refused_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compared(*_: Any) -> RulesChecked:
        raise AssertionError("the script is looked at")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder / "mesh_rules.toml"))

    monkeypatch.setattr(checking, "check_rules", compared)
    monkeypatch.setattr(files, "check_place", full)
    assert run(monkeypatch, "check", "train.py", "--update") == 2
    assert "read-only file system" in capsys.readouterr().err
