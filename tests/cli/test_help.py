"""Help texts and the dry run, word for word, and that they are true."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from automesh.cli import app as cli
from automesh.cli.added.commands import load_command
from automesh.plugins.offered import SHORT_HELPS
from tests.support.cases import bad_inputs_run
from tests.support.cases.bad_inputs import GOOD
from tests.support.plugins import is_installed

FOLDER = bad_inputs_run.GOLDEN.parent
HELPS = {
    "help": "--help",
    "help_search": "search --help",
    "help_check": "check --help",
    "help_check_script": "check-script --help",
    "help_lint": "lint --help",
    "help_show": "show --help",
    "help_explain": "explain --help",
    "help_report": "report --help",
    "help_targets": "targets --help",
    "help_presets": "presets --help",
    "help_calibrate": "calibrate --help",
    "help_export": "export --help",
    "help_import": "import --help",
    "help_doctor": "doctor --help",
    "help_agent": "agent --help",
    "help_hosts": "hosts --help",
    "help_serve": "serve --help",
    "help_submit": "submit --help",
    "help_token": "token --help",
}
IN_PLUGINS = {"help_serve", "help_submit", "help_token"}
FIGURE = re.compile(r"[0-9.]+(?= (?:us|ms|s|B|KiB|MiB|%))")
EXAMPLE = re.compile(r"^ {4}automesh (.+?)(?: {3,}.*| \| .*)?$", re.MULTILINE)


def helps() -> list[str]:
    """The commands that print a help here."""
    return [
        words for name, words in HELPS.items() if name not in IN_PLUGINS or is_installed("service")
    ]


@pytest.fixture(scope="module", autouse=True)
def _shared() -> Iterator[None]:
    with bad_inputs_run.inspections_shared():
        yield


def check(name: str, text: str) -> None:
    """Compares with the golden file, which `pytest` writes if it is not there."""
    path = FOLDER / f"{name}.txt"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path} was not there and is written now: read it")
    assert text == path.read_text(encoding="utf-8")


def marked(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.plugin("service")) if name in IN_PLUGINS else name


@pytest.mark.parametrize("name", [marked(name) for name in HELPS])
def test_help(name: str, tmp_path: Path) -> None:
    ran = bad_inputs_run.run(HELPS[name], tmp_path, {"COLUMNS": "80"})
    assert (ran.code, ran.stderr) == (0, "")
    assert max(map(len, ran.stdout.splitlines())) <= 80
    check(name, ran.stdout)


def test_help_does_not_need_a_wide_terminal(tmp_path: Path) -> None:
    for name in helps():
        ran = bad_inputs_run.run(name, tmp_path, {"COLUMNS": "200"})
        assert max(map(len, ran.stdout.splitlines())) <= 80


def test_no_command_gets_the_help(tmp_path: Path) -> None:
    ran = bad_inputs_run.run("", tmp_path)
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.stderr == bad_inputs_run.run("--help", tmp_path).stdout


def test_every_example_in_the_help_is_a_command(tmp_path: Path) -> None:
    group = typer.main.get_command(cli.app)
    commands = dict(group.commands)  # pyright: ignore
    # Those of plug-ins are loaded when they are called.
    commands |= {name: load_command(name) for name in SHORT_HELPS if is_installed("service")}
    seen = set()
    for help_text in helps():
        for example in EXAMPLE.findall(bad_inputs_run.run(help_text, tmp_path).stdout):
            command, *arguments = shlex.split(example)
            seen.add(command)
            commands[command].make_context(command, arguments)
    assert seen == set(commands) - (set() if is_installed("service") else set(SHORT_HELPS))


def test_the_space_in_the_help_is_one(tmp_path: Path) -> None:
    from automesh.space.spec import read_space

    text = bad_inputs_run.run("search --help", tmp_path).stdout
    start = text.index("    batch_axes")
    toml = re.sub(r"^    ", "", text[start : text.index("\n\n", start)], flags=re.MULTILINE)
    assert set(tomllib.loads(toml)) == {"batch_axes", "axes", "constraints", "mapping", "knobs"}
    (tmp_path / "space.toml").write_text(toml)
    assert str(read_space(str(tmp_path / "space.toml")).constraints[0]) == "tp divides num_heads"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_dry_run(width: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GOOD)
    command = "search train.py --target cpu:4 --dry-run"
    ran = bad_inputs_run.run(command, tmp_path, {"COLUMNS": str(width)})
    assert ran.code == 0
    # Who is first is told while the estimates are made; how often is a matter of time.
    told = ran.stderr.splitlines(keepends=True)
    leaders = [line for line in told if line.startswith(("first ranked: ", "now first: "))]
    assert leaders and leaders[0].startswith("first ranked: ")
    assert all(line.endswith((" estimated)\n", " not estimated yet)\n")) for line in leaders)
    assert "".join(line for line in told if line not in leaders) == (
        "note: knob `microbatches` left out: `build` does not take it\n"
        "note: the mesh that `build` gets also has the axes fsdp, ep, sp of size 1: they are in "
        "the space `auto`, and the step never uses them\n"
        "enumerate 45/45, 9 legal\n"
    )
    assert max(map(len, ran.stdout.splitlines())) <= width
    (study,) = (tmp_path / "results").glob("train-cpu-4-*")
    assert {one.name for one in study.iterdir()} >= {"study.db", "estimates.csv"}
    assert len((study / "estimates.csv").read_text().splitlines()) == 1 + 9
    # The figures depend on the version of jax, the rest does not.
    check(f"dry_run_{width}", FIGURE.sub(lambda found: "0" * len(found[0]), ran.stdout))
