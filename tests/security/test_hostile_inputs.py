"""Hundreds of wrong inputs: each is refused at once, with a sentence that a terminal may show."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil
import pytest
import typer

from automesh.cli.added.commands import load_command
from automesh.cli.app import app
from automesh.plugins.offered import SHORT_HELPS
from tests.support.cases import bad_inputs_run, hostile_inputs
from tests.support.cases.bad_inputs import UNUSED
from tests.support.cases.hostile_inputs import Hostile

ROWS = hostile_inputs.all_rows()
# Begin with the command, so that `-k presets` runs the rows of one.
NAMES = [re.sub(r"\W+", "-", row.name) for row in ROWS]
LIMIT_S = 5.0
# A machine that does other work may let us wait: what waits for a pipe waits without end.
HANGS_S = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("hostile")
    hostile_inputs.places(found)
    return found


@pytest.fixture(autouse=True)
def _no_process() -> Iterator[None]:
    """What a worker would have to find out is none of the parent's refusals."""
    with mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a process is started")):
        yield


@pytest.fixture(scope="module", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Typer looks at all signatures in every call, which takes longer than a refusal."""
    command = typer.main.get_command(app)
    with mock.patch.object(typer.main, "get_command", lambda _: command):
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_endless_reading() -> Iterator[None]:
    """What reads a device to its end must not take the memory of the machine first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    held = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (held + 4 * 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _hangs(*_: object) -> None:
    raise TimeoutError(f"not refused within {HANGS_S:.0f} s")


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.setitimer(signal.ITIMER_REAL, HANGS_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def marked(row: Hostile) -> object:
    """A row with the marker of the plug-in that reads what is wrong in it."""
    command = row.words[0] if row.words else ""
    if command in SHORT_HELPS or any(word.startswith("--server") for word in row.words):
        return pytest.param(row, marks=pytest.mark.plugin("service"))
    if command in ("export", "import"):
        return pytest.param(row, marks=pytest.mark.plugin("frameworks"))
    return row


@pytest.mark.parametrize("row", [marked(row) for row in ROWS], ids=NAMES)
def test_is_refused(row: Hostile, folder: Path) -> None:
    for name, content in row.files.items():
        (folder / name).write_bytes(content)
    began_s = time.process_time()
    ran = bad_inputs_run.run(row.words, folder, row.variables)
    took_s = time.process_time() - began_s
    for name, content in row.files.items():
        assert (folder / name).read_bytes() == content
    assert ran.code == 2, ran
    assert ran.stdout == ""
    lines = ran.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, ran.stderr
    assert any(word in ran.stderr for word in row.says), ran.stderr
    for foreign in ("Traceback", "Error(", "site-packages", "\ufffd"):
        assert foreign not in ran.stderr
    assert all(char.isprintable() for line in ran.stderr.split("\n") for char in line)
    assert max(map(len, lines)) < 3_000
    assert (folder / "train.py").read_text() == UNUSED
    assert (folder / "note").read_text() == "mine\n"
    assert took_s < LIMIT_S


def test_there_are_at_least_five_hundred() -> None:
    assert len({(row.words, *row.files.items(), *row.variables.items()) for row in ROWS}) >= 500


FAMILIES = {"command": "search", "kubernetes": "search", "agent of a service": "agent"}


@pytest.mark.plugin("service")
def test_every_option_is_among_them() -> None:
    """An option that is added gets texts that must be refused."""
    tried = {
        (FAMILIES.get(family, family), option)
        for family, by_option in hostile_inputs.WRONG.items()
        for option in by_option
    }
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    # Those of plug-ins are loaded when they are called.
    commands = {**group.commands, **{name: load_command(name) for name in SHORT_HELPS}}
    there = {
        (name, option.opts[0])
        for name, command in commands.items()
        for option in command.params
        if option.param_type_name == "option" and not getattr(option, "is_flag", False)
    }
    assert there == tried
