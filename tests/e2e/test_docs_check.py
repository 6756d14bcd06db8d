"""The guide to `automesh check` is executed, and so are the shell steps of the action."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.test_readme import block as block_of_readme
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs" / "check.md").read_text()
COMMANDS = re.findall(r"^automesh .*", GUIDE, re.MULTILINE)
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())


def block(name: str) -> str:
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", GUIDE, re.DOTALL)
    assert found
    return found[1]


@pytest.mark.long
def test_commands_of_the_guide_and_the_steps_of_the_action_work(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block_of_readme("script"))
    (tmp_path / "mesh_rules.toml").write_text(block("mesh_rules.toml"))
    assert len(COMMANDS) == 4
    for number, command in enumerate(COMMANDS[:2]):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == (0 if number else 2), done.stderr
    # The steps of the action, as a runner would run them; nothing is installed.
    (step,) = [one for one in ACTION["runs"]["steps"] if one.get("id") == "check"]
    given = {"script": "train.py", "rules": "", "against": "", "args": "--select cpu-4"}
    variables = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)
        for name, text in step["env"].items()
    }
    files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    python = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env={
            **os.environ,
            **variables,
            **files,
            "RUNNER_TEMP": str(tmp_path),
            "PATH": f"{python}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert "1 rules: 1 hold" in (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert "junit=" in (tmp_path / "GITHUB_OUTPUT").read_text()
    assert 'failures="0"' in (tmp_path / "automesh-check.xml").read_text()


def test_the_action_puts_no_input_into_a_script() -> None:
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"], step["name"]
        assert step["shell"] == "bash"
    used = set(re.findall(r"inputs\.(\w+)", (ROOT / "action.yml").read_text()))
    assert used == set(ACTION["inputs"])


def test_the_workflow_of_the_guide_uses_what_the_action_has() -> None:
    workflow = yaml.safe_load(block("workflow"))
    (job,) = workflow["jobs"].values()
    (ours,) = [step for step in job["steps"] if "automesh" in step["uses"]]
    assert set(ours["with"]) <= set(ACTION["inputs"])
    wanted = {name for name, one in ACTION["inputs"].items() if one.get("required")}
    assert wanted <= set(ours["with"])
