"""A search of two processes with DCN between them, by the command, from its start to the rule."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.paths import SCRIPTS

pytestmark = pytest.mark.long

WORDS = ("search", "train.py", "--target", "cpu:2*2", "--space", "space.toml")
MORE = ("--budget", "4m", "--top", "3")


def run(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "automesh", *WORDS, *MORE, *more],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(SCRIPTS / "gang", tmp_path_factory.mktemp("gang") / "work"))


def test_it_ends_with_a_measured_rule_and_goes_on(folder: Path) -> None:
    ran = run(folder, "--baseline", "dcn.dp:2,dp:2", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    (rule,) = tomllib.loads((folder / "mesh_rules.toml").read_text())["rule"]
    assert rule["match"] == "cpu-2-2"
    assert rule["evidence"]["kind"] == "measured"
    assert sum(rule["dcn"].values()) == 2 + len(rule["dcn"]) - 1
    assert found["target"] == "cpu-2-2"
    logs = [path.name for path in next((folder / "results").iterdir()).glob("logs/*.log")]
    assert any("-rank0-local-1" in name for name in logs)
    assert any("-rank1-local-2" in name for name in logs)
    again = run(folder, "--baseline", "dcn.dp:2,dp:2")
    assert again.returncode == 0, again.stderr
    assert "all agree" in again.stdout
