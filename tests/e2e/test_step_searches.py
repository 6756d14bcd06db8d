"""Every shape of step in `scripts/steps`, searched from its beginning to its rule."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import automesh
from automesh import api
from automesh.outcomes import Failed, Measured, OutOfMemory, TimedOut
from tests.support.paths import SCRIPTS
from tests.support.program_jobs import few_processes

STEPS = SCRIPTS / "steps"
SPACE = "[axes]\ndp = {}\ntp = {}\n"
LEGAL = {"dp:4", "dp:2,tp:2", "tp:4"}


@pytest.mark.long
@pytest.mark.parametrize("script", sorted(STEPS.glob("*.py")), ids=lambda path: path.stem)
def test_a_step_is_searched_from_its_script_to_its_rule(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    few_processes(monkeypatch)
    found = search(script, tmp_path).found

    ended_badly = {
        one.plan.mesh: one.outcome
        for one in found.candidates
        if isinstance(one.outcome, Failed | OutOfMemory | TimedOut)
    }
    assert not ended_badly
    assert found.funnel.legal == len(LEGAL)
    measured = {
        one.plan.mesh: one.outcome for one in found.candidates if isinstance(one.outcome, Measured)
    }
    assert measured.keys() <= LEGAL
    doubts = {
        mesh: one.numerics_detail
        for mesh, one in measured.items()
        if one.numerics not in ("agree", "reference")
    }
    assert not doubts

    (rule,) = tomllib.loads((tmp_path / "mesh_rules.toml").read_text())["rule"]
    assert rule["match"] == "cpu-4"
    assert rule["evidence"]["kind"] == "measured"
    chosen = ",".join(f"{name}:{size}" for name, size in rule["ici"].items() if size > 1)
    assert isinstance(measured[chosen], Measured)
    assert measured[chosen].confirmed


def search(script: Path, folder: Path) -> automesh.Result:
    space = folder / "space.toml"
    space.write_text(SPACE)
    return api.search(
        str(script),
        target="cpu:4",
        space=space,
        budget="90s",
        top=2,
        workers=1,
        rules=folder / "mesh_rules.toml",
        results=folder / "results",
    )
