"""The page on inferred shardings is executed: its script is searched, and three lines use the rule.

The README's rule is used by the same script.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from automesh.mesh.rules.file import read_rules
from tests.support.paths import ROOT

PAGE, README = (ROOT / "docs" / "infer.md").read_text(), (ROOT / "README.md").read_text()
SHARDS = 'print(params["up"].sharding.spec, momentum["down"].sharding.spec)\n'


def block(name: str, text: str) -> str:
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", text, re.DOTALL)
    assert found, f"there is no block `{name}`"
    return found[1]


SCRIPT, LINES = block("one_device.py", PAGE), block("three lines", PAGE)
BY_COLUMNS = block("by_columns.py", PAGE)


def run(words: list[str], cwd: Path, devices: int) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def with_lines() -> str:
    """The script, with the three lines before its loop."""
    before, loop = SCRIPT.split("\nfor step", 1)
    return f"{before}\n{LINES}\nfor step{loop}{SHARDS}"


def test_the_readme_shows_the_same_three_lines() -> None:
    assert block("three lines", README) == LINES


@pytest.mark.slow
def test_three_lines_use_the_rule_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "mesh_rules.toml").write_text(block("inferred rule", README))
    (tmp_path / "plain.py").write_text(SCRIPT)
    (tmp_path / "train.py").write_text(with_lines())
    alone = float(run(["plain.py"], tmp_path, 8))
    loss, shards = run(["train.py"], tmp_path, 8).splitlines()
    assert float(loss) == pytest.approx(alone, rel=1e-3)
    assert "('fsdp', 'tp')" in shards and "('tp', 'fsdp')" in shards


@pytest.mark.slow
def test_other_shardings_are_tried_beside_those_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "by_columns.py").write_text(BY_COLUMNS)
    words = ["-m", "automesh", "search", "by_columns.py", "--infer", "--dry-run"]
    said = " ".join(run([*words, "--target", "tpu-v5p-16"], tmp_path, 8).split())
    assert "`vocab_weights` (vocab) over model" in said
    assert "`params` (parameters that it leaves whole) over data" in said
    # The row of the script's own shardings, and one of the same mesh with a split by rows.
    assert re.search(r"data:4,model:2 \(baseline\) +\d", said)
    assert re.search(r"data:4,model:2 vocab_weights:model +\d", said)


@pytest.mark.long
def test_the_script_is_searched_to_a_rule_that_it_can_use(tmp_path: Path) -> None:
    (tmp_path / "one_device.py").write_text(SCRIPT)
    words = ["-m", "automesh", "search", "one_device.py", "--infer", "--target", "cpu:4"]
    said = run([*words, "--budget", "4m"], tmp_path, 4)
    assert "those of the step on one" in " ".join(said.split())
    rule = tomllib.loads((tmp_path / "mesh_rules.toml").read_text())["rule"][0]
    assert rule["evidence"]["kind"] == "measured"
    assert read_rules(tmp_path / "mesh_rules.toml").rules[0].shardings
    (tmp_path / "train.py").write_text(with_lines())
    loss, _ = run(["train.py"], tmp_path, 4).splitlines()
    assert float(loss) == pytest.approx(float(run(["one_device.py"], tmp_path, 4)), rel=1e-3)
