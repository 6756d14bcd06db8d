"""Temporary folders end with their search; those of searches that were killed, with the next."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from automesh.errors import UsageError
from automesh.worker import temporary
from automesh.worker.temporary import folder_until_exit, temporary_folder
from tests.support.paths import ROOT

MARK = ".automesh-temporary"


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _collect_again()
    yield tmp_path
    _collect_again()


def _collect_again() -> None:
    temporary._collect.cache_clear()  # pyright: ignore[reportPrivateUsage]


HOLDER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from automesh.worker.temporary import temporary_folder
with temporary_folder("session") as folder:
    (folder / "logs").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a temporary folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(parent)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_private_and_goes_with_the_body(parent: Path) -> None:
    with temporary_folder("session") as folder:
        assert folder.parent == parent
        assert folder.name.startswith("automesh-session-")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "log").write_text("x")
    assert list(parent.iterdir()) == []


def test_what_a_killed_search_left_goes_with_the_next_one(parent: Path) -> None:
    killed, left = holder(parent)
    alive, kept = holder(parent)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.is_dir(), "nobody could remove it"
    with temporary_folder("session"):
        assert not left.exists()
        assert kept.is_dir(), "its process lives"
    alive.communicate()
    assert alive.returncode == 0
    assert list(parent.iterdir()) == []


def test_nothing_else_is_collected(parent: Path) -> None:
    # As a user may call a folder, and as former versions did, whose processes may be alive.
    mine = parent / "automesh-my-experiments"
    former = parent / "automesh-session-abcdefgh"
    linked = parent / "automesh-session-linked00"
    open_to_all = parent / "automesh-session-public00"
    for folder in (mine, former, open_to_all):
        folder.mkdir(mode=0o700)
    for folder in (mine, open_to_all):
        (folder / MARK).write_text("")
    open_to_all.chmod(0o755)
    linked.symlink_to(mine)
    with temporary_folder("session"):
        pass
    assert {path.name for path in parent.iterdir()} == {
        mine.name,
        former.name,
        linked.name,
        open_to_all.name,
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_account_is_left_alone(parent: Path) -> None:
    other = parent / "automesh-session-stranger"
    other.mkdir(mode=0o700)
    (other / MARK).write_text("")
    os.chown(other, 65534, 65534)
    with temporary_folder("session"):
        pass
    assert other.exists()


def test_a_mark_that_is_a_link_is_not_followed(parent: Path) -> None:
    folder = parent / "automesh-session-00000000"
    folder.mkdir(mode=0o700)
    (folder / MARK).symlink_to("/dev/full")
    with temporary_folder("session"):
        pass
    assert folder.is_dir()


def test_a_folder_until_exit(parent: Path) -> None:
    code = "import sys, tempfile; tempfile.tempdir = sys.argv[1]\n"
    code += "from automesh.worker.temporary import folder_until_exit\n"
    code += "print(folder_until_exit('build').is_dir())"
    command = [sys.executable, "-c", code, str(parent)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert list(parent.iterdir()) == []


def test_no_place_for_it_is_one_sentence(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "none"))
    for make in (lambda: temporary_folder("session").__enter__(), lambda: folder_until_exit("x")):
        with pytest.raises(UsageError, match="cannot be made: no such file or directory") as caught:
            make()
        assert "TMPDIR" in caught.value.hint
        assert "\n" not in caught.value.message


def test_a_file_system_without_locks_will_do(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, every search was refused there. Without a mark nobody takes the folder for left."""

    def refuse(_: int, __: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folder("session") as folder:
        assert folder.is_dir()
        assert not (folder / MARK).exists()
    assert list(parent.iterdir()) == []


def test_where_others_may_rename_it_is_made_among_the_caches(
    parent: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is unpickled and run lies in it: who renames it puts a folder of theirs there."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("AUTOMESH_CACHE", str(cache / "mine"))
    parent.chmod(0o1777)
    with temporary_folder("session") as folder:
        assert folder.parent == parent, "as in /tmp"
    parent.chmod(0o777)
    with temporary_folder("session") as folder:
        assert folder.parent == cache / "mine" / "temporary"
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert list(folder.parent.iterdir()) == list(parent.iterdir()) == []
    cache.chmod(0o777)
    with pytest.raises(UsageError, match="no temporary folder is safe from other") as caught:
        temporary_folder("session").__enter__()
    assert f"`{parent}`" in caught.value.message
    assert f"`{cache}`" in caught.value.message
    assert "TMPDIR" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_another_account_is_no_place_for_it(
    parent: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMESH_CACHE", str(tmp_path_factory.mktemp("cache")))
    os.chown(parent, 65534, 65534)
    with temporary_folder("session") as folder:
        assert folder.parent != parent
