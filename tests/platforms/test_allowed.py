"""Limits of a shell that are too low: said in one sentence, and no fault of the script's."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from automesh.errors import UsageError, of_system
from automesh.outcomes import Failed, OutOfMemory
from automesh.platforms import allowed
from automesh.program.nouns import Entry
from automesh.tuner.worker_errors import inspection_error, machine_error
from automesh.worker import blame
from automesh.worker.process import Guarded

ENTRY = Entry(kind="script", location="/x/train.py", function="build")


def limit(monkeypatch: pytest.MonkeyPatch, **low: int) -> None:
    """Sets limits of this process, as it sees them: by their names without `RLIMIT_`."""
    kinds = {getattr(resource, f"RLIMIT_{name}"): value for name, value in low.items()}

    def getrlimit(kind: int) -> tuple[int, int]:
        return (kinds.get(kind, resource.RLIM_INFINITY), resource.RLIM_INFINITY)

    monkeypatch.setattr(allowed.resource, "getrlimit", getrlimit)
    monkeypatch.setattr(allowed.os, "geteuid", lambda: 1000)


def test_too_few_files_are_said_before_a_worker_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the worker ended while it started, and the script was to blame."""
    limit(monkeypatch, NOFILE=64)
    with pytest.raises(UsageError, match="no more than 64 files open here") as caught:
        Guarded(["true"], variables={}, log=tmp_path / "log", memory_limit_bytes=2**30)
    assert "`ulimit -n 1024`" in caught.value.hint
    limit(monkeypatch, NOFILE=allowed.LEAST_FILES)
    allowed.check_files()


@pytest.mark.parametrize(
    ("low", "command"),
    [
        ({"NPROC": 5}, "`ulimit -u 4096`"),
        ({"AS": 10**9}, "`ulimit -v unlimited`"),
        ({"AS": 10**9, "NPROC": 5}, "`ulimit -u 4096`, `ulimit -v unlimited`"),
    ],
)
@pytest.mark.parametrize(
    "failure",
    [
        Failed(stage="start", reason="the worker could not start: ImportError: failed to map"),
        Failed(stage="build", reason="the worker exited with code 127 while building the step"),
        Failed(stage="start", reason="the worker was lost while starting"),
        OutOfMemory(stage="build", needed_bytes=1, limit_bytes=2, detail="Python ran out"),
    ],
)
def test_a_worker_that_ends_under_a_low_limit_blames_no_script(
    monkeypatch: pytest.MonkeyPatch, low: dict[str, int], command: str, failure: Failed
) -> None:
    limit(monkeypatch, **low)
    assert command in inspection_error(failure, ENTRY).hint
    assert "train.py" not in inspection_error(failure, ENTRY).hint
    if failure.stage == "start":
        assert command in machine_error(failure).hint
    limit(monkeypatch)
    assert "ulimit" not in inspection_error(failure, ENTRY).hint


def test_a_fault_of_the_script_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, AS=10**9)
    reason = "`build` raised ValueError: no"
    error = inspection_error(Failed(stage="build", reason=reason, where="train.py:3"), ENTRY)
    assert error.message == f"train.py:3: {reason}"
    assert "ulimit" not in error.hint


@pytest.mark.parametrize(
    ("number", "command"),
    [
        (errno.EMFILE, "ulimit -n"),
        (errno.EAGAIN, "ulimit -u"),
        (errno.ENOMEM, "ulimit -v"),
        (errno.ENOSPC, "check the disk"),
    ],
)
def test_what_the_system_refuses_says_which_limit(number: int, command: str) -> None:
    assert command in of_system(OSError(number, "no")).hint


def test_where_builtins_are_replaced_a_refusal_says_so_first() -> None:
    """Before, `builtins.len = lambda x: 0` let a script be told that its knobs have no default."""
    refused = Failed(stage="build", reason="`build` needs `remat`", hint="give it a default")
    hint = blame.hint_where_replaced(("len",), refused)
    assert hint.startswith("the script replaces the builtin `len`")
    assert hint.endswith("if it was not that: give it a default")


@pytest.mark.parametrize(("processes", "threads"), [(2, "1"), (511, "1"), (512, None)])
def test_numpy_starts_no_threads_where_few_are_allowed(
    monkeypatch: pytest.MonkeyPatch, processes: int, threads: str | None
) -> None:
    """Before, `ulimit -u 1` was a traceback of KeyboardInterrupt in the middle of an import."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    limit(monkeypatch, NPROC=processes)
    allowed.spare_threads()
    assert os.environ.get("OPENBLAS_NUM_THREADS") == threads
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    allowed.spare_threads()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "8"


def test_the_command_line_asks_for_it_before_numpy_is_there() -> None:
    words = "import sys, automesh.cli; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
