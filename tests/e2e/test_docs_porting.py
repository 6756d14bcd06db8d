"""The guide to porting is executed: its scripts are searched to measured rules, and use them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from automesh.program.carry.stored_step import LARGEST_STORED_BYTES
from automesh.report.words import count
from tests.program.carry.test_check import SAID
from tests.support.paths import ROOT

GUIDE = (ROOT / "docs" / "porting.md").read_text()
FILES = dict(re.findall(r"<!-- (\w+\.\w+) -->\n```\w+\n(.*?)```", GUIDE, re.DOTALL))
SEARCHES = [
    shlex.split(line)
    for part in re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    for line in part.splitlines()
    if line.startswith("automesh search") and any(f" {name} " in line for name in FILES)
]
COMMANDS = [words for words in SEARCHES if "--command" in words]
SEARCHES = [words for words in SEARCHES if words not in COMMANDS]
# As they stand in the table of sources.
SOURCES = ["capture", *re.findall(r"`--step-time '(.*?)'`", GUIDE)]
USING = """
import automesh
config = automesh.load("mesh_rules.toml").select()
mesh = config.create_device_mesh()
import {module}
built = {module}.build(mesh, **config.knobs)
print(dict(mesh.shape), mesh.axis_types)
"""


def run(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "COLUMNS": "100"}
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400
    )


@pytest.mark.long
@pytest.mark.parametrize("words", SEARCHES, ids=[words[2] for words in SEARCHES])
def test_a_script_of_the_guide_is_searched_to_a_rule_that_it_can_use(
    words: list[str], tmp_path: Path
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    # On a slow machine whose other core is busy, 40 s do not suffice for three fresh processes.
    words = [*words[: words.index("--budget") + 1], "2m"]
    done = run([sys.executable, "-m", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    written = tomllib.loads((tmp_path / "mesh_rules.toml").read_text())
    assert written["rule"][0]["evidence"]["kind"] == "measured", done.stdout
    module = words[2].removesuffix(".py")
    used = run([sys.executable, "-c", USING.format(module=module)], tmp_path)
    assert used.returncode == 0, used.stderr


@pytest.mark.long
@pytest.mark.parametrize("source", SOURCES)
def test_the_command_of_the_guide_is_searched_to_a_rule(source: str, tmp_path: Path) -> None:
    (words,) = COMMANDS
    (tmp_path / "flags_train.py").write_text(FILES["flags_train.py"])
    # The program's own Python, whatever `python` is here.
    command = words[3].replace("python ", f"{shlex.quote(sys.executable)} ", 1)
    words = [*words[:3], command, *words[4:], "--step-time", source]
    done = run([sys.executable, "-m", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    (rule,) = tomllib.loads((tmp_path / "mesh_rules.toml").read_text())["rule"]
    assert rule["match"] == "cpu-4"
    assert rule["evidence"]["kind"] == "measured", done.stdout
    assert "flags_train.py --fsdp " in done.stdout


def test_what_the_guide_says_of_a_second_run_is_what_is_said() -> None:
    told = " ".join(GUIDE.split())
    assert f"with their values (up to {LARGEST_STORED_BYTES // 2**30} GiB)" in told
    assert SAID["batch_and_loss_by_mesh"] in told
    assert SAID["in_parts"].partition("works")[2] in told
    starts = ("first run", "data:2,model:4", "data:8,model:1")
    assert f"started {count(len(starts), 'time')}: {', '.join(starts)}`" in told


def test_every_source_of_step_times_is_in_the_table() -> None:
    assert [one.partition(":")[0] for one in SOURCES] == ["capture", "jsonl", "regex"]


def test_every_script_of_the_guide_is_searched() -> None:
    scripts = {name for name in FILES if name.endswith(".py")}
    assert scripts == {*(words[2] for words in SEARCHES), "flags_train.py"}


def test_the_table_of_the_guide_names_every_recipe() -> None:
    linked = set(re.findall(r"\]\(#([\w-]+)\)", GUIDE))
    titles = {
        line[3:].lower().replace(" ", "-") for line in GUIDE.splitlines() if line[:3] == "## "
    }
    assert linked <= titles, linked - titles


def test_links_of_the_guide_lead_somewhere() -> None:
    for link in re.findall(r"\]\((\.\./[^)#]+)", GUIDE):
        assert (ROOT / "docs" / link).exists(), link
