"""What becomes of a search whose estimates kill their worker: a crash of an MLIR pass."""

from __future__ import annotations

from pathlib import Path

import pytest

import automesh
from tests.support.paths import SCRIPTS

SCRIPT = SCRIPTS / "shardy_crashes.py"


@pytest.mark.slow
@pytest.mark.long
def test_a_crash_of_a_pass_falls_back_to_the_compiler(tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text("[axes]\ndp = {}\ntp = {}\n")
    result = automesh.search(
        str(SCRIPT),
        target="cpu:2",
        space=str(space),
        budget="40s",  # On a slow machine, too, a fifth of it must reach the crash.
        top=2,
        results=str(tmp_path / "results"),
        rules=str(tmp_path / "mesh_rules.toml"),
    )
    # Both meshes were compiled and measured all the same, and the reason is told.
    outcomes = [one["outcome"]["kind"] for one in result.to_json()["candidates"]]
    assert outcomes == ["measured", "measured"]
    table = result.table()
    assert "SIGABRT" in table, table
