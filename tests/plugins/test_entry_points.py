"""Plug-ins as they are found: one that is missing, broken, or there twice gives a sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from automesh.errors import NotInstalled, UsageError
from automesh.plugins import entry_points
from automesh.plugins.command import PluginCommand
from automesh.plugins.entry_points import installed, load
from automesh.plugins.framework import framework_at, framework_called, is_framework
from automesh.plugins.offered import COMMANDS, DISTRIBUTIONS, SHORT_HELPS, offered, who_offers
from tests.support.paths import EXAMPLES, ROOT
from tests.support.plugins import WITHOUT, is_installed

# Runs the command line where no entry points are found: as if no plug-in were installed.
ALONE = """
import importlib.metadata
real = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **given: real(group="automesh.nothing")
import sys
from automesh.__main__ import main
sys.argv[0] = "automesh"
main()
"""


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Iterator[None]:
    entry_points.installed.cache_clear()
    yield
    entry_points.installed.cache_clear()


def make(folder: Path, name: str, points: str, code: str = "") -> None:
    """A distribution of somebody else, as pip leaves it in a folder."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(points)
    (folder / f"{name}.py").write_text(code)


def alone(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ALONE, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_table_is_what_the_distributions_say() -> None:
    assert [one.folder for one in DISTRIBUTIONS] == [f"plugins/{name}" for name in WITHOUT]
    for one in DISTRIBUTIONS:
        project = tomllib.loads((ROOT / one.folder / "pyproject.toml").read_text())["project"]
        assert project["name"] == one.name
        said = {group: tuple(points) for group, points in project["entry-points"].items()}
        assert said == dict(one.names)
        assert not any(name.startswith("jax-automesh-") for name in project["dependencies"])
    assert offered(COMMANDS) == tuple(SHORT_HELPS)


@pytest.mark.plugin("service")
@pytest.mark.plugin("frameworks")
@pytest.mark.plugin("pipeline")
def test_every_name_of_the_table_can_be_loaded() -> None:
    for one in DISTRIBUTIONS:
        for group, names in one.names.items():
            for name in names:
                assert load(group, name) is not None
    for name, short_help in SHORT_HELPS.items():
        command: PluginCommand = load(COMMANDS, name, PluginCommand)
        assert (command.name, command.short_help) == (name, short_help)


@pytest.mark.parametrize(
    ("words", "what", "plugin"),
    [
        (("serve",), "`automesh serve`", "service"),
        (("serve", "--help"), "`automesh serve`", "service"),
        (("submit", "train.py", "--target", "cpu:8"), "`automesh submit`", "service"),
        (("token", "ann"), "`automesh token`", "service"),
        (("search", "x.py", "--server", "http://h"), "`automesh search --server`", "service"),
        (("agent", "--server", "http://h"), "`automesh agent --server`", "service"),
        (("search", "levanter", "--", "--x"), "`automesh search levanter`", "frameworks"),
        (("search", "x.py", "--baseline", "maxtext:x"), "the format of maxtext", "frameworks"),
        (("export", "r.toml", "--to", "maxtext"), "the format of maxtext", "frameworks"),
        (("import", "x.yml", "--from", "levanter"), "the format of levanter", "frameworks"),
    ],
    ids=lambda one: " ".join(one) if isinstance(one, tuple) else None,
)
def test_a_command_says_which_plug_in_it_needs(
    tmp_path: Path, words: tuple[str, ...], what: str, plugin: str
) -> None:
    shutil.copy(EXAMPLES / "dense_lm.py", tmp_path / "x.py")
    (tmp_path / "x").write_text("x: 1")
    (tmp_path / "x.yml").write_text("x: 1")
    rule = "[[rule]]\nmatch = 'cpu-8'\nici = { dp = 8 }\n"
    (tmp_path / "r.toml").write_text(f"schema = 1\naxes = ['dp']\nbatch_axes = ['dp']\n{rule}")
    done = alone(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    option = "--baseline: " if "--baseline" in words else ""
    assert done.stderr == (
        f"error: {option}{what} is in a plug-in that is not installed: "
        f"pip install jax-automesh-{plugin} (in a clone: pip install -e plugins/{plugin})\n"
    )


def test_the_help_lists_the_commands_of_plug_ins_without_them(tmp_path: Path) -> None:
    golden = ROOT / "tests" / "golden" / "cli" / "help.txt"
    assert alone("--help", cwd=tmp_path).stdout == golden.read_text()


def test_a_name_of_a_pipeline_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from automesh import pipeline

    monkeypatch.setattr(entry_points, "entry_points", lambda group: ())
    with pytest.raises(NotInstalled, match=r"`automesh\.pipeline\.train_step` is in a plug-in"):
        pipeline.train_step  # noqa: B018  # pyright: ignore[reportUnusedExpression]
    with pytest.raises(ImportError, match="pip install jax-automesh-pipeline"):
        from automesh.pipeline import MpmdMesh as MpmdMesh


def test_a_broken_plug_in_gives_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = "[automesh.commands]\nbad = broken_mesh:BAD\nodd = broken_mesh_odd:ODD\n"
    make(tmp_path, "broken_mesh", points, "raise RuntimeError('no\\nway')")
    (tmp_path / "broken_mesh_odd.py").write_text("ODD = 3")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError) as caught:
        load(COMMANDS, "bad", PluginCommand)
    assert caught.value.message == (
        "`bad` is in the plug-in broken_mesh, which cannot be loaded: RuntimeError: no way"
    )
    assert caught.value.hint == "install it again: pip install --force-reinstall broken_mesh"
    with pytest.raises(UsageError, match="is made for another version of automesh"):
        load(COMMANDS, "odd", PluginCommand)


def test_a_name_that_two_plug_ins_add_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a", "mesh_a", "[automesh.commands]\nours = mesh_a:X\n")
    make(tmp_path / "b", "mesh_b", "[automesh.commands]\nours = mesh_b:X\n")
    monkeypatch.syspath_prepend(tmp_path / "a")
    monkeypatch.syspath_prepend(tmp_path / "b")
    with pytest.raises(UsageError, match="is added by several plug-ins, mesh_a and mesh_b"):
        load(COMMANDS, "ours")


def test_a_framework_of_somebody_else_is_searched_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from automesh.plugins.framework import Framework\n"
        "MINE = Framework(name='minetext', title='Mine', package='mine', install='', "
        "module='minetext.step', space='auto', seen_in='', example='')\n"
    )
    make(tmp_path, "minetext", "[automesh.frameworks]\nminetext = minetext:MINE\n", code)
    monkeypatch.syspath_prepend(tmp_path)
    assert is_framework("minetext") and not is_framework("elsetext")
    assert framework_called("minetext").title == "Mine"
    found = framework_at("minetext.step")
    assert found is not None and found.name == "minetext"
    assert framework_at("mine.step") is None
    with pytest.raises(NotInstalled, match=r"what adds it to the group `automesh.frameworks`"):
        framework_called("elsetext")
    assert who_offers("automesh.frameworks", "elsetext") is None


def test_a_command_of_somebody_else_is_listed_and_run(tmp_path: Path) -> None:
    code = (
        "from automesh.plugins.command import PluginCommand\n"
        "def greet(name: str = 'you') -> None:\n"
        "    print('hello', name)\n"
        "HELLO = PluginCommand(name='hello', help='Greet.', short_help='Greet.', run=greet)\n"
    )
    make(tmp_path, "hello_mesh", "[automesh.commands]\nhello = hello_mesh:HELLO\n", code)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])

    def run(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "automesh", *words],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        ).stdout

    assert run("--help").splitlines()[-1].split() == ["hello", "Greet."]
    assert run("hello", "--name", "mesh") == "hello mesh\n"


def test_a_search_loads_no_plug_in_and_looks_for_none(tmp_path: Path) -> None:
    """Plug-ins cost nothing where they are not used."""
    code = (
        "import json, sys, importlib.metadata as m\n"
        "asked, real = [], m.entry_points\n"
        "def looked(**given):\n"
        "    asked.append(given.get('group', ''))\n"
        "    return real(**given)\n"
        "m.entry_points = looked\n"
        "import automesh\n"
        "from automesh.cli import app\n"
        "from automesh.tuner.request import read_request\n"
        f"read_request({str(EXAMPLES / 'dense_lm.py')!r}, {{'baseline': 'fsdp:8 remat=full'}})\n"
        "ours = [one for one in asked if one.startswith('automesh')]\n"
        "loaded = [one for one in sys.modules if one.startswith('automesh_')]\n"
        "print(json.dumps([ours, loaded]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=600,
    )
    assert json.loads(done.stdout) == [[], []]


def test_what_is_installed_here_is_found() -> None:
    found = set(installed(COMMANDS))
    assert set(SHORT_HELPS) <= found if is_installed("service") else not set(SHORT_HELPS) & found
