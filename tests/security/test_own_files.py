"""What is unpickled comes from a folder that this account alone can have written into."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from automesh.foreign.private import append_own, is_own_folder, read_own
from automesh.program.capture.build import captured_build
from automesh.program.capture.nouns import Capture, ScriptMesh, ScriptStep, SourceLine
from automesh.program.carry.starts import note_start
from automesh.program.nouns import Entry
from automesh.reading import Unreadable

NOBODY = 65534


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, NOBODY, NOBODY)


def linked(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "open to all": lambda folder: folder.chmod(0o777),
    "open to a group": lambda folder: folder.chmod(0o770),
    "of another account": give_away,
    "a link": linked,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "automesh-step-01234567"
    place.mkdir(mode=0o700)
    (place / "x").write_bytes(b"mine")
    return place


def test_a_file_of_ones_own(folder: Path) -> None:
    assert is_own_folder(folder)
    append_own(folder / "x", b" and more")
    append_own(folder / "y", b"new")
    assert read_own(folder / "x", limit_bytes=13) == b"mine and more"
    assert read_own(folder / "y", limit_bytes=13) == b"new"
    with pytest.raises(Unreadable, match="larger than anything"):
        read_own(folder / "x", limit_bytes=12)
    with pytest.raises(Unreadable, match="no such file"):
        read_own(folder / "none", limit_bytes=12)


@pytest.mark.parametrize("how", FOREIGN)
def test_a_folder_of_others(folder: Path, how: str) -> None:
    FOREIGN[how](folder)
    assert not is_own_folder(folder)
    with pytest.raises(Unreadable):
        read_own(folder / "x", limit_bytes=100)
    with pytest.raises(Unreadable):
        append_own(folder / "x", b"more")
    assert (folder / "x").read_bytes() == b"mine"


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_a_file(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.parametrize(
    "change", [lambda path: path.chmod(0o666), give_away, a_pipe, link_to_a_file]
)
def test_a_file_of_others_in_a_folder_of_ones_own(
    folder: Path, change: Callable[[Path], object]
) -> None:
    change(folder / "x")
    with pytest.raises(Unreadable):
        read_own(folder / "x", limit_bytes=100)
    with pytest.raises(Unreadable):
        append_own(folder / "x", b"more")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.mkdir, (str(self.path), 0o700)


@pytest.mark.parametrize("how", FOREIGN)
def test_a_stored_step_of_others_is_not_unpickled(folder: Path, how: str) -> None:
    """Before, on the host of an agent: whoever had seen the folder's name where the search runs
    could make one of that name there, and ran code as the account of the agent."""
    victim = folder.with_name("victim")
    (folder / "step.pickle").write_bytes(pickle.dumps(Bomb(victim)))
    profile = folder.with_name("profile")
    profile.write_bytes(b"")
    (folder / "starts").symlink_to(profile)
    FOREIGN[how](folder)
    line = SourceLine(file="train.py", line=1)
    capture = Capture(
        mesh=ScriptMesh(axes=(("dp", 2),), axis_types=("auto",), made_at=line),
        step=ScriptStep(name="step", defined_at=line, called_at=line, argument_bytes=1),
        folder=str(folder),
        carried_by="trace",
    )
    script = folder.with_name("train.py")
    script.write_text("")
    entry = Entry(kind="script", location=str(script), function="step", capture=capture)
    captured_build(entry)
    note_start(str(folder), "first run")
    assert not victim.exists()
    assert profile.read_bytes() == b""
