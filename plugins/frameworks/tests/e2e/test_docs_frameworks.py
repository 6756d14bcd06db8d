"""The guide to frameworks is executed: its files are written, its commands run in turn."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from automesh.report.export.frameworks import names
from automesh.space.spec import read_space
from automesh_frameworks.steps.registry import FRAMEWORKS as SEARCHED
from automesh_frameworks.steps.registry import Framework
from plugins.frameworks.tests.support.cases.export_orders import FRAMEWORKS
from tests.e2e.test_readme import block as block_of_readme
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs" / "frameworks.md").read_text()
FILES = re.findall(r"<!-- ([\w.]+) -->\n```\w+\n(.*?)```", GUIDE, re.DOTALL)
COMMANDS = re.findall(r"^automesh .*", GUIDE, re.MULTILINE)


@pytest.mark.long
def test_commands_of_the_guide_work(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block_of_readme("script"))
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    assert len(COMMANDS) == 11
    for command in COMMANDS:
        words = shlex.split(command)
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout.strip() or "--out" in words
    assert (tmp_path / "mesh.yml").exists() and (tmp_path / "imported.toml").exists()


def test_the_export_of_the_readme_takes_the_rules_of_the_readme(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"`(automesh export mesh_rules\.toml --to \w+)`", text)
    assert found
    (tmp_path / "mesh_rules.toml").write_text(block_of_readme("rules"))
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(found[1])], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "ici_data_parallelism: 8\n" in done.stdout
    shown = re.search(r": ([0-9.]+ ms) measured in", " ".join(block_of_readme("output").split()))
    assert shown and f"{shown[1]} for a step, measured" in done.stdout


def test_the_tables_name_every_framework_and_axis() -> None:
    searched, said = GUIDE.split("## Rules in their words")
    rows = re.findall(r"^\| `(\w+)` \|", said, re.MULTILINE)
    assert rows == list(names())
    rows = re.findall(r"^\| `(\w+)` \|.*\(frameworks/(\w+)\.md\)", searched, re.MULTILINE)
    assert rows == [(name, name) for name in SEARCHED]
    for framework in FRAMEWORKS.values():
        for ours, theirs in framework.names:
            if ours not in ("stage", "model"):
                row = re.search(rf"^\| (?:\w+, )?{ours}(?:, \w+)? \|(.*)", GUIDE, re.MULTILINE)
                assert row and theirs in row[1], (framework.name, ours)


@pytest.mark.parametrize("framework", SEARCHED.values(), ids=list(SEARCHED))
def test_the_page_of_a_framework_tells_its_axes_knobs_and_version(framework: Framework) -> None:
    page = (ROOT / "docs" / "frameworks" / f"{framework.name}.md").read_text()
    assert f"automesh search {framework.name} --target cpu:8" in page
    assert f"search_spaces/{framework.name}.toml" in page
    assert framework.seen_in in page
    space = read_space(framework.space)
    (table,) = re.findall(r"^\| In a plan \|.*\n\|[-|]+\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert [one.name for one in space.axes if not re.search(rf"\b{one.name}\b", table)] == []
    assert [knob.name for knob in space.knobs if f"`{knob.name}`" not in table] == []
