"""Searches for several targets: what each has found is shown before the next one is searched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automesh.report.progress import Silent
from automesh.report.result import SearchResult
from automesh.tuner import several_targets
from automesh.tuner.request import SearchRequest, read_request
from tests.support.samples.results_samples import compiled_search


def requested(folder: Path) -> SearchRequest:
    """A dry run of a script for two targets."""
    script = folder / "train.py"
    script.write_text("def build(mesh): ...\n")
    return read_request(script, {"dry_run": True}, targets=["cpu:2", "cpu:4"])


def test_each_result_is_handed_out_before_the_next_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requested(tmp_path)
    seen: list[str] = []

    def start(request: SearchRequest, _: object) -> SearchResult:
        seen.append(f"search {request.target}")
        result = compiled_search()
        return replace(result, footer=replace(result.footer, interrupted=False))

    monkeypatch.setattr(several_targets, "start", start)
    found = several_targets.start_all(
        request,
        ["cpu:2", "cpu:4"],
        Silent,
        on_each=lambda result: seen.append(f"show {len(result.candidates) > 0}"),
    )
    assert seen == ["search cpu:2", "show True", "search cpu:4", "show True"]
    assert [one.target for one in found.searches] == ["cpu:2", "cpu:4"]


def test_ctrl_c_while_a_result_is_shown_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requested(tmp_path)
    monkeypatch.setattr(several_targets, "start", lambda *_: compiled_search())

    def show(_: SearchResult) -> None:
        raise KeyboardInterrupt

    found = several_targets.start_all(request, ["cpu:2", "cpu:4"], Silent, on_each=show)
    assert found.interrupted
    assert [one.reason for one in found.searches] == ["", "it was not begun"]
