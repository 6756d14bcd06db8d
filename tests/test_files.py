"""Files are written whole or not at all, and not through what somebody else has put there."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from automesh import files
from automesh.files import (
    check_place,
    drafts_in,
    open_log,
    replace_unchanged,
    write_new,
    write_whole,
)
from automesh.limits import ABANDONED_DRAFT_S
from tests.support.paths import ROOT


@pytest.fixture
def umask() -> Iterator[None]:
    """What a careful account has: nothing for others."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture(autouse=True)
def _collects_again() -> None:
    files._collect_drafts.cache_clear()  # pyright: ignore[reportPrivateUsage]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, "é\r\nb\n")
    assert path.read_bytes() == "é\r\nb\n".encode()
    write_whole(path, b"\xff", lasting=False)
    assert path.read_bytes() == b"\xff"
    assert names_in(tmp_path) == ["a"]


def test_a_new_file_gets_what_the_umask_leaves(tmp_path: Path, umask: None) -> None:
    write_whole(tmp_path / "whole", "x")
    assert write_new(tmp_path / "new", "x")
    open_log(tmp_path / "log").close()
    assert {mode_of(path) for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o640, 0o664, 0o444])
def test_a_file_that_is_there_keeps_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(mode)
    write_whole(path, "new")
    assert (mode_of(path), path.read_text()) == (mode, "new")
    assert replace_unchanged(path, "newer", expected="new")
    assert (mode_of(path), path.read_text()) == (mode, "newer")


def test_a_planted_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "a"
    victim.write_text("mine")
    path.symlink_to(victim)
    write_whole(path, "new")
    assert not path.is_symlink()
    assert (path.read_text(), victim.read_text()) == ("new", "mine")


def test_names_of_former_drafts_are_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (".a.tmp", "a.new", ".a.new"):
        (tmp_path / name).symlink_to(victim)
    write_whole(tmp_path / "a", "new")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("what", ["folder", "pipe", "link to a folder", "link to a device"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, what: str) -> None:
    path = tmp_path / "a"
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link to a folder":
            path.symlink_to(tmp_path)
        case _:
            path.symlink_to("/dev/null")
    before = path.lstat()
    for act in (
        lambda: write_whole(path, "new"),
        lambda: replace_unchanged(path, "new", expected=""),
        lambda: write_new(path, "new"),
        lambda: check_place(path),
        lambda: open_log(path),
    ):
        with pytest.raises(OSError) as caught:
            act()
        assert caught.value.filename == str(path)
    assert path.lstat().st_ino == before.st_ino
    assert names_in(tmp_path) == ["a"]


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim, log = tmp_path / "victim", tmp_path / "worker.log"
    victim.write_text("mine")
    log.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        open_log(log)
    assert victim.read_text() == "mine"


def test_a_log_goes_on_at_its_end(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    for text in (b"one\n", b"two\n"):
        with open_log(log) as file:
            file.write(text)
    assert log.read_bytes() == b"one\ntwo\n"


def test_a_name_as_long_as_a_name_can_be(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    write_whole(path, "x", alone=True)
    assert path.read_text() == "x"
    other = tmp_path / ("é" * 126 + "a")
    write_whole(other, "y", alone=True)
    assert len(names_in(tmp_path)) == 2


def test_what_a_killed_process_left_is_removed_in_time(tmp_path: Path) -> None:
    old, new, others = (tmp_path / f".{name}.{'0' * 16}.draft" for name in ("a", "b", "c"))
    for path in (old, new):
        path.write_text("half")
    other = tmp_path / ".notes.draft"
    other.write_text("mine")
    then = time.time() - ABANDONED_DRAFT_S - 60
    for path in (old, other):
        os.utime(path, (then, then))
    write_whole(tmp_path / "x", "x")
    assert names_in(tmp_path) == [new.name, other.name, "x"]
    assert not others.exists()


def test_who_holds_the_lock_removes_the_drafts_of_the_file_at_once(tmp_path: Path) -> None:
    mine = tmp_path / f".r.toml.{'0' * 16}.draft"
    of_another_file = tmp_path / f".r.toml.bak.{'0' * 16}.draft"
    for path in (mine, of_another_file):
        path.write_text("half")
    write_whole(tmp_path / "r.toml", "x", alone=True)
    assert names_in(tmp_path) == [of_another_file.name, "r.toml"]


KILLED = """
import os, sys
from pathlib import Path
from automesh import files
files.os.fsync = lambda _: os.kill(os.getpid(), 9)
files.write_whole(Path(sys.argv[1]), "new")
"""


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert path.read_text() == "old"
    (draft,) = drafts_in(tmp_path)
    assert mode_of(draft) == mode_of(path)
    write_whole(path, "new", alone=True)
    assert names_in(tmp_path) == ["a"]


@pytest.fixture(params=["exchange", "no exchange"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernel's help, and as where there is none."""
    if request.param == "no exchange":
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    return request.param


def test_only_what_was_expected_is_replaced(tmp_path: Path, _ways: str) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    assert not replace_unchanged(path, "new", expected="other")
    assert path.read_text() == "old"
    assert replace_unchanged(path, "new", expected="old")
    assert path.read_text() == "new"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        replace_unchanged(path, "new", expected="new")
    assert names_in(tmp_path) == []


def test_an_edit_between_the_look_and_the_exchange_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    exchange, calls = files._exchange, []  # pyright: ignore[reportPrivateUsage]

    def late(one: Path, other: Path) -> bool:
        calls.append(one)
        if len(calls) == 1:
            other.write_text("saved by an editor")
        return exchange(one, other)

    monkeypatch.setattr(files, "_exchange", late)
    assert not replace_unchanged(path, "new", expected="old")
    assert path.read_text() == "saved by an editor"
    assert names_in(tmp_path) == ["a"]


def test_the_last_of_two_edits_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("saved")
    exchange, calls = files._exchange, []  # pyright: ignore[reportPrivateUsage]

    def late(one: Path, other: Path) -> bool:
        calls.append(one)
        if len(calls) == 2:  # What was found is about to be put back.
            other.write_text("saved again")
        return exchange(one, other)

    monkeypatch.setattr(files, "_exchange", late)
    assert not replace_unchanged(path, "new", expected="old")
    assert path.read_text() == "saved again"


def test_an_editor_that_had_opened_the_file_before_keeps_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with path.open("r+", buffering=1) as editor:
        # While the file that was replaced is watched.
        monkeypatch.setattr(files.time, "sleep", lambda _: print("edited", file=editor))
        assert not replace_unchanged(path, "new", expected="old")
    assert path.read_text() == "edited\n"


def test_a_new_file_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    assert write_new(path, "first")
    assert not write_new(path, "second")
    assert path.read_text() == "first"

    def none(*_: object) -> None:
        raise OSError(errno.EPERM, "no second names here")

    monkeypatch.setattr(os, "link", none)
    assert not write_new(path, "second")
    assert write_new(tmp_path / "b", "second")
    assert names_in(tmp_path) == ["a", "b"]


def test_the_place_of_the_lock_is_looked_at_too(tmp_path: Path) -> None:
    path, lock = tmp_path / "a", tmp_path / ".a.lock"
    check_place(path)
    assert names_in(tmp_path) == []
    lock.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        check_place(path)
    assert caught.value.filename == str(lock)
    lock.rmdir()
    lock.symlink_to(tmp_path / "victim")
    with pytest.raises(OSError) as caught:
        check_place(path)
    assert caught.value.filename == str(lock)
    assert names_in(tmp_path) == [".a.lock"]
    lock.unlink()
    with files.lock_beside(path, timeout_s=1):
        check_place(path)  # That another one has it now is no reason to refuse.


def test_a_file_that_vanishes_meanwhile_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process makes room in a cache between any two looks at a file."""
    path = tmp_path / "kept"
    look = Path.stat

    def seen_then_gone(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        try:
            return look(self, follow_symlinks=follow_symlinks)
        finally:
            self.unlink(missing_ok=True)

    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", seen_then_gone)  # `lstat` is `stat` that follows no link
        write_whole(path, "new")
    assert path.read_text() == "new"
