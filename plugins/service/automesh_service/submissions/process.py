"""The process of a submission's search: starts it, finds it again after kills, and ends it.

The process is `automesh search` in a session of its own. It holds a lock in the folder of its
submission as long as it lives: a runner that replaces the one which started it waits for this
process, and does not start a second one. The submitted code may change anything in this folder, so
this module waits for nothing in it, follows no links, and reads nothing without a bound.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from automesh.errors import AutomeshError
from automesh.files import open_log, write_whole
from automesh.jsonio import dumps
from automesh.limits import REMOTE_ANSWER_BYTES, SMALL_RECORD_BYTES
from automesh.reading import open_regular, parse_json, read_bytes, read_text
from automesh.texts.terminal import clean
from automesh.tuner.study.identity import BUNDLE

TOKEN = "AUTOMESH_SERVER_TOKEN"
TOKEN_FILE = "AUTOMESH_SERVER_TOKEN_FILE"
"""Environment variables with a service's token, which are removed: a submitted search has no use
for them."""
_END_S = 60.0
"""Seconds for a search to end after SIGTERM: it saves its results and ends its workers."""
_LOG_TAIL_BYTES = 2**14


@dataclass(kw_only=True)
class SearchProcess:
    """A search that runs.

    Attributes:
      job: the folder of its submission.
      process: None if another process has started it.
    """

    job: Path
    process: subprocess.Popen[bytes] | None
    told_s: float = 0.0

    def has_ended(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        try:
            lock = _locked(self.job)
        # The submitted code has removed the lock: nothing can wait for the process any more.
        except OSError:
            return True
        if lock is not None:
            os.close(lock)
        return lock is not None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs, or if another process is its parent."""
        return self.process.returncode if self.process is not None else None

    def tell_to_end(self) -> None:
        """Asks it to end as Ctrl-C does; kills it if that does not help."""
        now_s = time.monotonic()
        if not self.told_s:
            self.told_s = now_s
            self._signal(signal.SIGTERM)
        elif now_s - self.told_s > _END_S:
            self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """Kills it at once, with all processes of its session."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.process.pid if self.process else _pid_of(self.job)
        if pid is None:
            return
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)


def start_search(job: Path, folder: Path, words: Sequence[str], *, run: int) -> SearchProcess:
    """Starts a search, or finds the one that already runs there.

    Args:
      job: the folder of its submission.
      folder: the folder of its bundle, in which it is started. Its studies are identified by the
        number of the submission and not by this path, so that another host can continue them.
      run: number of this run of the submission.

    Raises:
      OSError: the disk is full, no process can be started, or something is in the way of a file.
    """
    lock = _locked(job)
    # While the other process lives, no second one may measure for this submission.
    if lock is None:
        return SearchProcess(job=job, process=None)
    try:
        # The output of a former run does not count for this one.
        (job / "result.json").unlink(missing_ok=True)
        _mark(job, run, 0)
        with open_log(job / "search.log") as log, _new_file(job / "result.json") as result:
            process = subprocess.Popen(
                words,
                cwd=folder,
                env=_environment() | {BUNDLE: f"{job.name}:{folder}"},
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
            )
    finally:
        os.close(lock)  # From now on the search holds the lock.
    started = SearchProcess(job=job, process=process)
    try:
        _mark(job, run, process.pid)
    except BaseException:
        started.kill()
        process.wait()
        raise
    return started


def find_search(job: Path) -> SearchProcess | None:
    """Returns the search that another process has started and that still runs; None if there is
    none.

    Raises:
      OSError: the lock of the submission cannot be used.
    """
    job.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = _locked(job)
    if lock is None:
        return SearchProcess(job=job, process=None)
    os.close(lock)
    return None


def code_of(job: Path, run: int) -> int | None:
    """Returns the exit code of a search that ended while its parent was gone; None if the search
    was cut short, as far as its files show."""
    if _marked(job).get("run") != run or not _is_whole(job / "result.json"):
        return None
    return 0 if (job / "mesh_rules.toml").exists() else 1


def run_of(job: Path) -> int:
    """Returns the number of the last run that was started in a folder; 0 for none."""
    run = _marked(job).get("run", 0)
    return run if isinstance(run, int) else 0


def last_error(job: Path) -> str:
    """Returns the last sentence of a search that ended with an error; empty if there is none."""
    with suppress(OSError, AutomeshError), open_regular(job / "search.log", follow=False) as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
        lines = log.read(_LOG_TAIL_BYTES).decode(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return clean(errors[-1], 300) if errors else ""
    return ""


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in (TOKEN, TOKEN_FILE)}


def _mark(job: Path, run: int, pid: int) -> None:
    mark = {"run": run, "pid": pid, "created_s": _created_s(pid) if pid else 0.0}
    write_whole(job / "process.json", dumps(mark))


def _marked(job: Path) -> dict[str, Any]:
    with suppress(AutomeshError):
        found = parse_json(read_text(job / "process.json", limit_bytes=SMALL_RECORD_BYTES))
        return found if isinstance(found, dict) else {}
    return {}


def _pid_of(job: Path) -> int | None:
    """Returns the process id of a search that another process has started, if it still is the same
    process."""
    mark = _marked(job)
    with suppress(KeyError, TypeError, ValueError):
        pid = int(mark["pid"])
        if pid > 0 and abs(_created_s(pid) - float(mark["created_s"])) < 1.0:
            return pid
    # The runner was killed before it could note the process id: the command line identifies the
    # process.
    word = f"--rules={job / 'mesh_rules.toml'}"
    for process in psutil.process_iter(["cmdline"]):
        if word in (process.info["cmdline"] or ()):
            return process.pid
    return None


def _created_s(pid: int) -> float:
    """Returns when a process was started; 0 if it has ended already."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def _locked(job: Path) -> int | None:
    """Takes the lock of a submission's search; returns None while such a search lives."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(job / "search.lock", flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _new_file(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _is_whole(path: Path) -> bool:
    """Whether a search has printed its whole result."""
    with suppress(AutomeshError, ValueError, RecursionError):
        return bool(json.loads(read_bytes(path, limit_bytes=REMOTE_ANSWER_BYTES)))
    return False
