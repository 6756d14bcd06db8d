"""The guide to targets is executed: every command that needs no compiler for them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_readme import block as block_of_readme
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs" / "targets.md").read_text()
COMMANDS = [
    shlex.split(line)
    for part in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for line in part.splitlines()
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(block_of_readme("script"))
    (folder / "space.toml").write_text(block_of_readme("space"))
    found = re.search(r"<!-- clusters.toml -->\n```toml\n(.*?)```", GUIDE, re.DOTALL)
    assert found
    (folder / "clusters.toml").write_text(found[1])
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    # One in CI.
    [one if one == COMMANDS[0] else pytest.param(one, marks=pytest.mark.long) for one in COMMANDS],
    ids=lambda words: "-".join(words[1:4]),
)
def test_commands_of_the_guide_work(words: list[str], project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=project, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_links_of_the_guide_lead_somewhere() -> None:
    for link in re.findall(r"\]\((\.\./[^)]+)\)", GUIDE):
        assert (ROOT / "docs" / link).exists(), link
