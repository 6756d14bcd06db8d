"""Every write meets a full disk, a read-only one and one that is not ours: one sentence, the exit
code of an error that the user can mend, the old file whole, and nothing left behind.

The faults are put in at each step of writing; and all of it is done once on a real disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest
import sqlalchemy as sa

from automesh import files
from automesh.tuner.study.storage import parse_storage
from automesh.worker import guardian
from tests.security.writers import LOG, RUN, STORAGES, WRITERS, Refused, Writer, attempt
from tests.support.paths import ROOT
from tests.support.samples.storage_cases import opened, plans

ERRNOS = {"ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EACCES": errno.EACCES}
STEPS = ("open", "write", "rename")


class _Full(io.BufferedWriter):
    """A file on which some bytes find room, and the next do not."""

    code = 0

    def write(self, data: Any, /) -> NoReturn:
        os.write(self.fileno(), bytes(data)[:1])
        raise OSError(self.code, os.strerror(self.code))


@contextlib.contextmanager
def refusing(step: str, code: int) -> Iterator[None]:
    """Lets the system refuse one step of every writing: to make a file, to fill it, to name it."""

    def refuse(*words: Any, **_: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    really_open, really_fdopen = os.open, os.fdopen

    def open_no_new(path: Any, flags: int, *others: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code), path)
        return really_open(path, flags, *others, **named)

    def fill_none(descriptor: int, mode: str = "r", *others: Any, **named: Any) -> Any:
        if mode != "wb":
            return really_fdopen(descriptor, mode, *others, **named)
        file = _Full(io.FileIO(descriptor, "wb"))
        file.code = code
        return file

    with contextlib.ExitStack() as patches:
        match step:
            case "open":
                patches.enter_context(mock.patch.object(os, "open", open_no_new))
            case "write":
                patches.enter_context(mock.patch.object(os, "fdopen", fill_none))
            case _:
                patches.enter_context(mock.patch.object(files, "_exchange", refuse))
                for name in ("rename", "replace", "link"):
                    patches.enter_context(mock.patch.object(os, name, refuse))
        yield


def check(refused: Refused, writer: Writer, reasons: tuple[str, ...]) -> None:
    """One sentence that names the file and the reason, one hint, exit code 2, nothing lost."""
    assert refused.code == 2, refused
    lines = refused.said.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"], refused.said
    assert writer.names in lines[0], refused.said
    assert any(reason in lines[0].lower() for reason in reasons), refused.said
    assert refused.lost == refused.left == (), refused


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ERRNOS)
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.name)
def test_a_refused_write(tmp_path: Path, writer: Writer, name: str, step: str) -> None:
    act = writer.prepare(tmp_path)
    code = ERRNOS[name]
    check(attempt(tmp_path, act, refusing(step, code)), writer, (os.strerror(code).lower(),))
    assert attempt(tmp_path, act, contextlib.nullcontext()).code == 0, "and it can be mended"


@pytest.mark.parametrize("name", ERRNOS)
@pytest.mark.parametrize("writer", [RUN, LOG], ids=lambda writer: writer.name)
def test_a_process_whose_files_cannot_be_made(tmp_path: Path, writer: Writer, name: str) -> None:
    act, code = writer.prepare(tmp_path), ERRNOS[name]
    check(attempt(tmp_path, act, refusing("open", code)), writer, (os.strerror(code).lower(),))
    assert attempt(tmp_path, act, contextlib.nullcontext()).code == 0


# A real limit of the kernel: no file may grow beyond some bytes.


@contextlib.contextmanager
def _no_larger_files(limit_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("writer", [*WRITERS, STORAGES[1]], ids=lambda writer: writer.name)
def test_a_file_that_may_not_grow(tmp_path: Path, writer: Writer) -> None:
    act = writer.prepare(tmp_path)
    limit = 1 + max((tmp_path / "study.journal").stat().st_size, 0) if writer in STORAGES else 1
    check(attempt(tmp_path, act, _no_larger_files(limit)), writer, ("file too large",))
    assert attempt(tmp_path, act, contextlib.nullcontext()).code == 0


# The storages, by what their own libraries say when they meet such a disk


@pytest.mark.parametrize(
    ("pragma", "reason"),
    [
        ("max_page_count = 1", "database or disk is full"),
        ("query_only = ON", "attempt to write a readonly database"),
    ],
)
def test_a_database_that_cannot_grow(tmp_path: Path, pragma: str, reason: str) -> None:
    with opened(parse_storage("", tmp_path)) as study:
        study.lead()
        study.compile.enqueue(plans(3))
        engine: sa.Engine = study._backend.optuna.engine  # pyright: ignore

        def limit(connection: sqlite3.Connection, _: object) -> None:
            connection.execute(f"PRAGMA {pragma}")

        engine.dispose()
        sa.event.listen(engine, "connect", limit)
        refused = attempt(
            tmp_path, lambda: study.compile.enqueue(plans(25)), contextlib.nullcontext()
        )
        check(refused, STORAGES[0], (reason,))
        sa.event.remove(engine, "connect", limit)
        engine.dispose()
        kept = [trial.plan for trial in study.compile.trials()]
        assert kept[:3] == plans(3), "what was finished is kept"
        study.compile.enqueue(plans(25))
        assert len(study.compile.trials()) == 25


@pytest.mark.parametrize("name", ERRNOS)
def test_a_journal_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    act, code = STORAGES[1].prepare(tmp_path), ERRNOS[name]
    (tmp_path / "study.journal.flock").unlink()  # Otherwise it is there, and needs not be made.
    refused = attempt(tmp_path, act, refusing("open", code))
    check(refused, STORAGES[1], (os.strerror(code).lower(),))
    assert attempt(tmp_path, act, contextlib.nullcontext()).code == 0


def test_a_database_that_cannot_be_opened(tmp_path: Path) -> None:
    act = STORAGES[0].prepare(tmp_path)
    said = "unable to open database file"
    fault = mock.patch.object(sqlite3, "connect", side_effect=sqlite3.OperationalError(said))
    check(attempt(tmp_path, act, fault), STORAGES[0], (said,))
    assert attempt(tmp_path, act, contextlib.nullcontext()).code == 0


def test_half_a_line_of_a_journal_is_cut_off(tmp_path: Path) -> None:
    act = STORAGES[1].prepare(tmp_path)
    journal = tmp_path / "study.journal"
    whole = journal.read_bytes()
    check(attempt(tmp_path, act, _no_larger_files(len(whole) + 30)), STORAGES[1], ("too large",))
    assert journal.read_bytes().startswith(whole)
    assert attempt(tmp_path, act, contextlib.nullcontext()).code == 0
    assert all(json.loads(line) for line in journal.read_bytes().splitlines())


# The real thing where there is one: /dev/full says that the disk is full


def test_a_lost_log_is_no_reason_to_lose_the_job() -> None:
    with Path("/dev/full").open("r+b", buffering=0) as full:
        log = guardian.BoundedLog(full)
        log.write(b"something\n")
        log.write(b"more\n")


def test_a_guardian_tells_how_it_ended_though_nothing_can_be_written() -> None:
    ours, theirs = socket.socketpair()
    full = os.open("/dev/full", os.O_RDWR)
    command = [sys.executable, "-P", guardian.__file__, str(os.getpid()), str(theirs.fileno())]
    command += ["-1", str(2**30), str(full), "/bin/sh", "-c", "echo lost; exit 3"]
    with ours:
        process = subprocess.Popen(
            command, stdout=full, stderr=full, pass_fds=(theirs.fileno(), full)
        )
        theirs.close()
        ours.settimeout(60)
        told = b""
        while not told.endswith(b"\n"):
            told += ours.recv(4096)
        process.wait(timeout=600)
    os.close(full)
    assert json.loads(told)["code"] == 3


# All of it on a real disk


@pytest.fixture(scope="module")
def on_a_disk() -> dict[str, dict[str, Refused]]:
    """What became of each write, by fault."""
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    may_mount = os.geteuid() == 0 and sys.platform == "linux"
    if not may_mount or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("this account may not mount a disk; the faults are put in by other tests")
    # Where every account may enter, which is not so below pytest's own folder.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run(
            ["unshare", "-m", sys.executable, "-m", "tests.security.writers", folder],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(done.stdout)
    return {
        fault: {
            name: Refused(
                code=one["code"],
                said=one["said"],
                lost=tuple(one["lost"]),
                left=tuple(one["left"]),
            )
            for name, one in found.items()
        }
        for fault, found in found.items()
    }


REASONS = {
    "full": ("no space left on device", "disk is full", "disk i/o error"),
    "read-only": ("read-only file system", "may not be read and written"),
    "not ours": ("permission denied", "may not be read and written"),
}


@pytest.mark.parametrize("fault", REASONS)
@pytest.mark.parametrize("writer", [*WRITERS, *STORAGES, RUN, LOG], ids=lambda writer: writer.name)
def test_a_disk_that_refuses(
    on_a_disk: dict[str, dict[str, Refused]], writer: Writer, fault: str
) -> None:
    refused = on_a_disk[fault][writer.name]
    if writer == LOG and fault == "full":
        assert refused.code == 0, "a lost log is no reason to lose the job"
        return
    check(refused, writer, REASONS[fault])
