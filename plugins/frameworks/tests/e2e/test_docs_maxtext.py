"""The guide to MaxText is executed: on a stand-in for MaxText, and on the real one where it is.

Its first search is that of `plugins/frameworks/tests/steps/test_real_maxtext.py`, to a measured
rule.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from automesh.mesh.rules.file import read_rules
from plugins.frameworks.tests.steps.test_real_maxtext import SMALL
from plugins.frameworks.tests.support.own_parsers.process import OwnParser, missing
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs" / "frameworks" / "maxtext.md").read_text()
LINES = [
    shlex.split(line)
    for part in re.findall(r"```(?:bash|text)\n(.*?)```", GUIDE, re.DOTALL)
    for line in part.replace("\\\n", " ").splitlines()
]
SEARCHES = [words for words in LINES if words[:2] == ["automesh", "search"]]
(EXPORT,) = [words for words in LINES if words[:2] == ["automesh", "export"]]
(TRAINING,) = [words for words in LINES if words[0] == "python"]
# As a search writes it for the second command.
RULES = """
schema = 1
axes = ["data", "fsdp", "expert", "context", "tensor"]
batch_axes = ["data", "fsdp", "expert"]

[[rule]]
match = "tpu-v5p-64"
ici = { fsdp = 16, tensor = 2 }
knobs = { remat_policy = "full", gradient_accumulation_steps = 2 }
"""
NO_MAXTEXT = importlib.util.find_spec("maxtext") is None
NEEDS = "needs MaxText, installed as the head of tests/steps/test_real_maxtext.py says"


def run(words: list[str], folder: Path, *, path: Path = ROOT) -> str:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def dry(words: list[str]) -> list[str]:
    """A search that only estimates."""
    at = words.index("--")
    return [*words[:at], "--dry-run", "--json", *words[at:]]


def exported(folder: Path) -> str:
    (folder / "mesh_rules.toml").write_text(RULES)
    run(EXPORT, folder)
    return (folder / "mesh.yml").read_text()


def test_the_commands_are_those_that_are_tested() -> None:
    assert len(LINES) == 4 and len(SEARCHES) == 2
    assert tuple(SEARCHES[0][SEARCHES[0].index("--") + 1 :]) == SMALL


@pytest.mark.slow
@pytest.mark.parametrize("words", SEARCHES, ids=lambda words: words[words.index("--target") + 1])
def test_a_search_estimates_the_meshes_of_a_stand_in(words: list[str], tmp_path: Path) -> None:
    told = json.loads(
        run(dry(words), tmp_path, path=ROOT / "plugins/frameworks/tests/support/stand_ins")
    )
    assert told["baseline"].startswith("fsdp:")
    assert len(told["candidates"]) > 5


@pytest.mark.long
@pytest.mark.skipif(NO_MAXTEXT, reason=NEEDS)
@pytest.mark.parametrize("words", SEARCHES, ids=lambda words: words[words.index("--target") + 1])
def test_a_search_estimates_the_meshes_of_maxtext(words: list[str], tmp_path: Path) -> None:
    told = json.loads(run(dry(words), tmp_path))
    assert told["baseline"].startswith("fsdp:")
    assert len(told["candidates"]) > 5


def test_the_exported_keys_say_the_rule_again(tmp_path: Path) -> None:
    keys = yaml.safe_load(exported(tmp_path))
    # 256 rows in two microbatches on 32 devices.
    assert (keys["per_device_batch_size"], keys["gradient_accumulation_steps"]) == (4.0, 2)
    run(["automesh", "import", "mesh.yml", "--from", "maxtext", "--out", "again.toml"], tmp_path)
    (rule,) = read_rules(tmp_path / "again.toml").rules
    assert dict(rule.knobs) == {"remat": "full", "microbatches": 2, "batch": 256}


@pytest.mark.long
@pytest.mark.skipif(bool(missing("maxtext")), reason="needs MaxText's configuration")
def test_maxtext_takes_the_arguments_of_the_training(tmp_path: Path) -> None:
    assert TRAINING[:2] == ["python", "-m"]
    assert importlib.util.find_spec(TRAINING[2].partition(".")[0])
    assert TRAINING[3] == "mesh.yml"
    parser = OwnParser(name="maxtext")
    text = exported(tmp_path)
    found = parser.read(text, num_devices=32, num_granules=1, words=TRAINING[4:])
    parser.end()
    used = {name: ici for name, (ici, _) in found.sizes.items() if ici > 1}
    assert used == {"fsdp": 16, "tensor": 2}
    assert (found.global_batch, found.accumulation, found.remat) == (256, 2, "full")
