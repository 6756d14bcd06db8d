"""No text of others reaches a terminal as it is: tables, progress, logs, errors, CSV, JSON."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.text import Text

from automesh.answers import Result
from automesh.cli.guard import guarded
from automesh.diagnosis import DoctorFinding
from automesh.diagnosis import report_of as findings_report
from automesh.errors import AutomeshError, UsageError, of_system
from automesh.jsonio import dumps
from automesh.limits import MESSAGE_CHARS
from automesh.mesh.rules.explain import explain_rules, explain_settings
from automesh.mesh.rules.rule import MeshRule
from automesh.mesh.settings import Settings
from automesh.report.blocks.terminal import draw, render, told
from automesh.report.files.csv import dataframe, write_table
from automesh.report.progress import PlainProgress
from automesh.report.table import report_of
from automesh.worker.process import log_tail
from tests.support.samples import results_samples

NASTY = "\x1b]0;owned\x07\x1b[31mr\x9b2J\u202egnp\x07\udce9\ud800\u2028"
# Words that decide what is drawn, and are not drawn themselves.
_TAGS = ("kind", "verdict", "stage", "numerics", "values", "effort", "reference", "made", "name")


def spoiled(value: Any, field: str = "") -> Any:
    """A value with hostile text in every text of it."""
    if isinstance(value, str):
        return value if field in _TAGS or not value else f"{NASTY}{value}{NASTY}"
    if isinstance(value, tuple):
        return tuple(spoiled(one, field) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {
            one.name: spoiled(getattr(value, one.name), one.name)
            for one in fields(value)
            if one.name not in ("axes", "platform", "axis_types", "batch_axes")
        }
        return replace(value, **changes)
    return value


def obeyed(text: str) -> set[str]:
    """What a terminal might obey in a text, and what is no text."""
    return {char for char in text if not char.isprintable() and char not in "\n\t"}


RESULTS = [
    results_samples.measured_search(),
    results_samples.compiled_search(),
    results_samples.predicted_search(),
]


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.facts.searched.workload)
def test_a_result_of_anybody(result: Any, tmp_path: Path) -> None:
    """As from a storage that others write: no table, CSV or JSON hands its texts on."""
    bad = spoiled(result)
    text = render(report_of(bad, top=20, verbose=True), width=100, colour=False)
    assert not obeyed(text)
    assert "gnp" in text
    write_table(dataframe(bad), tmp_path / "trials.csv")
    written = (tmp_path / "trials.csv").read_bytes().decode()
    assert not obeyed(written)
    assert len(pd.read_csv(tmp_path / "trials.csv")) == len(result.candidates)
    said = dumps(Result(found=bad).to_json(), indent=1)
    assert not obeyed(said)
    json.dumps(json.loads(said), ensure_ascii=False).encode()


def test_what_nobody_cleaned_ends_where_it_is_drawn() -> None:
    text = draw([Text(f"first {NASTY}"), Text()], width=60, colour=True)
    assert not obeyed(text)
    assert "first" in text
    styled = draw([Text("bold", style="bold red")], width=60, colour=True)
    assert styled.startswith("\x1b[") and "bold" in styled  # colours are ours


def test_findings_of_a_doctor() -> None:
    finding = DoctorFinding(level="note", about=f"a{NASTY}", detail=NASTY, hint=NASTY)
    assert not obeyed(told(findings_report((finding,))))


def test_progress() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.notice(NASTY)
    progress.log(NASTY)
    progress.now(NASTY)
    progress.best(NASTY)
    progress.phase("compile", total=3, note=NASTY)
    assert not obeyed(stream.getvalue())


def test_a_log(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_bytes(b"--- compile ---\n" + NASTY.encode(errors="surrogatepass") + b"\xe9 end\n\tx")
    tail = log_tail(log)
    assert not obeyed(tail)
    assert "\u202e" not in tail and tail.endswith(" end\n\tx")


def test_rules_of_anybody() -> None:
    lines = explain_rules([MeshRule(match="a\x1b\\[31m\u202e", mesh_shape=(4,))], "cpu-4")
    lines += explain_settings(Settings({"remat": NASTY}), Settings(), {})
    assert not obeyed("\n".join(lines))


def test_every_error() -> None:
    """From Python as well, where nobody else would clean what a traceback ends with."""
    error = UsageError(f"message {NASTY}", hint=f"hint {NASTY}\n  second {NASTY}")
    assert not obeyed(str(error))
    assert "  second" in error.hint
    assert not obeyed(of_system(OSError(2, "No such file", NASTY)).message)
    long = AutomeshError("<" + "9" * 10**6 + ">", hint="\n".join(["8" * 10**5] * 3))
    assert len(long.message) < MESSAGE_CHARS and len(long.hint) < 10_000
    assert long.message.endswith(">")


def test_what_is_quoted_cannot_pass_for_a_line_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise UsageError("a\nhint: run this", hint="look:\nerror: all is lost\n  indented")

    monkeypatch.setattr(sys, "argv", ["automesh"])
    assert guarded(fail, []) == 2
    assert capsys.readouterr().err == (
        "error: a hint: run this\nhint: look:\n  error: all is lost\n  indented\n"
    )
