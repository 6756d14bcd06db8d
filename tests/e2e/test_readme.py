"""The README is executed: its commands, its script, its space, its snippets, its rule file."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from automesh.mesh.rules.file import read_rules
from automesh.space.spec import read_space
from tests.support.paths import ROOT
from tests.support.plugins import WITHOUT
from tests.support.undecided import until_decided

README = (ROOT / "README.md").read_text()
TEST = ".[test]"


def block(name: str) -> str:
    """The fenced block that follows the comment `<!-- name -->`."""
    found = re.search(rf"<!-- {re.escape(name)} -->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no block `{name}`"
    return found[1]


def commands() -> list[list[str]]:
    """Shell commands of the README, one list of words per command between `&&`."""
    lines = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    return [shlex.split(part) for line in lines for part in line.strip().split("&&")]


def run(words: list[str], cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    return subprocess.run(
        words,
        cwd=cwd,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert ["pytest"] in commands()
    assert "pytest" in script
    (install,) = [
        words for words in commands() if words[:2] == ["pip", "install"] and TEST in words
    ]
    plugins = [word for name in WITHOUT for word in ("-e", f"plugins/{name}")]
    assert install == ["pip", "install", "-q", "-e", TEST, *plugins]
    assert install in [shlex.split(line) for line in script if line.startswith("pip install")]
    guide = (ROOT / "docs" / "contributing.md").read_text()
    assert f"pip install {shlex.join(install[3:])}\n" in guide


@pytest.mark.slow
def test_the_first_command_finds_a_measured_rule(tmp_path: Path) -> None:
    search = next(words for words in commands() if words[:2] == ["automesh", "search"])
    for name in ("examples", "search_spaces"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Into a folder of its own: the clone's rules and results are the user's.
    search += ["--rules", str(tmp_path / "mesh_rules.toml")]
    command = [sys.executable, "-m", *search]
    done = until_decided(lambda: run(command, tmp_path, COLUMNS="80"), lambda one: one.stderr)
    assert done.returncode == 0, done.stderr
    rule = tomllib.loads((tmp_path / "mesh_rules.toml").read_text())["rule"][0]
    assert rule["match"] == "cpu-8"
    assert rule["evidence"]["kind"] == "measured"
    shown = block("output")
    assert max(map(len, shown.splitlines())) <= 80
    labels = re.findall(r"^[a-z]+(?: out)?(?= {2,}| )", shown, re.MULTILINE)
    for label in {"best", "tried", "numerics", "stopped", "saved", "next"}:
        assert label in labels
        # Beside other work the script's own mesh may be kept.
        here = "(best|keep)" if label == "best" else label
        assert re.search(rf"^{here} ", done.stdout, re.MULTILINE), done.stdout


# What needs no devices is the same everywhere, to the letter.
EXACT = {"estimates": "--dry-run", "explanation": "explain"}


def exact_output(name: str) -> str:
    """What the README's command prints whose output stands under `<!-- name -->`."""
    (command,) = [words for words in commands() if EXACT[name] in words]
    done = run([sys.executable, "-m", *command], ROOT, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return without_hash(done.stdout.strip() + "\n")


def without_hash(text: str) -> str:
    """The name of a study ends with a hash of where the script is."""
    return re.sub(r"(results/[a-z0-9_-]+)-[0-9a-f]{8}/", r"\1-HASH/", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("estimates", marks=pytest.mark.long), "explanation"])
def test_estimates_and_explanations_are_those_that_are_shown(name: str) -> None:
    assert exact_output(name) == without_hash(block(name))


def test_the_rule_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "mesh_rules.toml"
    path.write_text(block("rules"))
    rules = read_rules(path)
    assert rules.rules[0].match == "cpu-8"
    assert rules.rules[0].evidence.kind == "measured"
    shown = " ".join(block("output").split())
    # One screen that convinces: a mesh that changes, by how much, how sure.
    sentence = rf" best {re.escape(_plan_of(rules))} is (\S+)x faster than the script's (\S+)"
    found = re.search(sentence + r" \((\S+)x to (\S+)x\)", shown)
    assert found, shown
    factor, baseline, low, high = found.groups()
    assert 1.0 < float(low) < float(factor) < float(high)
    script = next(words for words in commands() if "--baseline" in words)
    assert script[script.index("--baseline") + 1] == baseline


def _plan_of(rules) -> str:
    from automesh.mesh.axes import MeshAxis, Plan

    (rule,) = rules.rules
    shape = zip(
        rules.axes, rule.mesh_shape.ici_mesh_shape, rule.mesh_shape.dcn_mesh_shape, strict=True
    )
    axes = tuple(MeshAxis(name=name, ici=ici, dcn=dcn) for name, ici, dcn in shape)
    return str(Plan(axes=axes, knobs=tuple(rule.knobs.items())))


def test_a_training_script_reads_the_rule(tmp_path: Path) -> None:
    (tmp_path / "mesh_rules.toml").write_text(block("rules"))
    (tmp_path / "use.py").write_text(block("train.py"))
    done = run([sys.executable, "use.py"], tmp_path, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")
    assert done.returncode == 0, done.stderr
    assert "remat" in done.stdout


@pytest.mark.slow
def test_the_script_the_space_and_the_api(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("script"))
    (tmp_path / "space.toml").write_text(block("space"))
    assert len(read_space(str(tmp_path / "space.toml")).constraints) == 2
    code = block("api") + "\nassert len(frame) and mesh_config.knobs['remat'] in (True, False)\n"
    (tmp_path / "use.py").write_text(code)
    done = until_decided(lambda: run([sys.executable, "use.py"], tmp_path), lambda one: one.stderr)
    assert done.returncode == 0, done.stderr
    assert "best" in done.stdout
    assert 'match = "cpu-4"' in (tmp_path / "mesh_rules.toml").read_text()
