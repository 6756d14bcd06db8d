"""A rule that rests on a compile serves a search on the devices, which replaces it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import automesh
from automesh.mesh.axes import Plan, parse_mesh
from automesh.mesh.evidence import Evidence
from automesh.mesh.rules.file import merge_rule, read_rules
from automesh.mesh.rules.rule import rule_for
from automesh.report.progress import Silent
from automesh.tuner.choose.prior_rule import _plan_of
from tests.support.fakes.absent_search import folder_for_search

AXES = ("dp", "fsdp", "ep", "tp", "sp")


def promise(folder: Path, mesh: str, *, kind: str = "compiled", **knobs: int) -> Path:
    path = folder / "mesh_rules.toml"
    plan = Plan(axes=parse_mesh(mesh, AXES), knobs=tuple(knobs.items()))
    evidence = Evidence(kind=kind, step_s=0.01, bracket_s=(0.005, 0.02), exposed_s=0.001)  # pyright: ignore
    merge_rule(
        path,
        rule_for(plan, selector="cpu-4", evidence=evidence),
        selector="cpu-4",
    )
    return path


class Listening(Silent):
    """Keeps what a search says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def notice(self, text: str) -> None:
        self.said.append(text)


def search(folder: Path) -> tuple[automesh.Result, list[str]]:
    progress = Listening()
    found = automesh.search(
        folder / "train.py",
        target="cpu:4",
        space=folder / "space.toml",
        budget="90s",
        top=1,
        results=folder / "results",
        rules=folder / "mesh_rules.toml",
        progress=progress,
    )
    return found, progress.said


@pytest.mark.parametrize(
    ("mesh", "expected"), [("dp:2,fsdp:2", "dp:2,fsdp:2"), ("dp:2,tp:2", None), ("dp:4", None)]
)
def test_a_rule_may_have_more_axes_than_the_search_if_they_are_of_size_one(
    tmp_path: Path, mesh: str, expected: str | None
) -> None:
    rules = read_rules(promise(tmp_path, mesh))
    legal = [Plan(axes=parse_mesh(text, ("dp", "fsdp"))) for text in ("fsdp:4", "dp:2,fsdp:2")]
    found = _plan_of(
        rules.rules[0],
        rules,
        cast("Any", SimpleNamespace(inspection=SimpleNamespace(knobs=()))),
        cast("Any", SimpleNamespace(plans=legal)),
    )
    assert (found and str(found)) == expected


@pytest.mark.slow
@pytest.mark.long
def test_the_promised_plan_is_raced_and_its_rule_replaced(tmp_path: Path) -> None:
    folder = folder_for_search(tmp_path)
    path = promise(folder, "tp:4")
    found, said = search(folder)
    assert any("starts from tp:4, 10.0 ms predicted" in text for text in said)
    measured = {str(one.plan) for one in found.found.candidates if one.outcome.kind == "measured"}
    # Beside the best by estimate; more of them, if there is time for another race.
    assert "tp:4" in measured and len(measured) >= 2
    rule = automesh.load(path).select("cpu-4")
    assert rule.evidence.kind == "measured"
    assert rule.evidence.bracket_s == () and rule.evidence.exposed_s == 0
    assert path.read_text().count("[[rule]]") == 1


@pytest.mark.long
def test_a_promise_that_is_not_legal_here_is_said(tmp_path: Path) -> None:
    folder = folder_for_search(tmp_path)
    promise(folder, "fsdp:4", width=16)
    _, said = search(folder)
    assert any("fsdp:4 width=16, which is no legal plan here" in text for text in said)


@pytest.mark.long
def test_a_measured_rule_promises_nothing(tmp_path: Path) -> None:
    folder = folder_for_search(tmp_path)
    promise(folder, "tp:4", kind="measured")
    _, said = search(folder)
    assert not any("starts from" in text for text in said)
