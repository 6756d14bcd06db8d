"""The search of a submission as a process: started, found again after kills, ended when asked.

It is `automesh search` in a session of its own, and holds a lock in the folder of its submission as
long as it lives: whoever comes after the one who started it waits for it instead of starting
another one beside it. Its code may do to this folder what its account may do, so nothing in it is
waited for, followed as a link, or read without a bound.
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
"""Variables with the token for a service: a search that others submitted has no use for them."""
_END_S = 60.0
"""For a search to end after SIGTERM: it keeps what it has and ends its workers."""
_LOG_TAIL_BYTES = 2**14


@dataclass(kw_only=True)
class SearchProcess:
    """A search that runs.

    Attributes:
      job: folder of its submission.
      process: None where somebody else has started it.
    """

    job: Path
    process: subprocess.Popen[bytes] | None
    told_s: float = 0.0

    def has_ended(self) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        try:
            lock = _locked(self.job)
        except OSError:  # Its own code took the lock away: nobody can wait for it any more.
            return True
        if lock is not None:
            os.close(lock)
        return lock is not None

    @property
    def code(self) -> int | None:
        """Its exit code; None if nobody was there to hear it."""
        return self.process.returncode if self.process is not None else None

    def tell_to_end(self) -> None:
        """As Ctrl-C first; by force if that does not help."""
        now_s = time.monotonic()
        if not self.told_s:
            self.told_s = now_s
            self._signal(signal.SIGTERM)
        elif now_s - self.told_s > _END_S:
            self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """At once, with all that is in its session."""
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
      job: folder of its submission.
      folder: of its bundle, in which it is started. Its studies are known by the number of the
        submission and not by this path, so that another host can go on with them.
      run: number of this run of the submission.

    Raises:
      OSError: the disk is full, no process can be started, or something is in the way of a file.
    """
    lock = _locked(job)
    if lock is None:  # As long as it lives nobody else may measure for this submission.
        return SearchProcess(job=job, process=None)
    try:
        # What a former run has printed says nothing of this one.
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
        os.close(lock)  # The search has it from now on.
    started = SearchProcess(job=job, process=process)
    try:
        _mark(job, run, process.pid)
    except BaseException:
        started.kill()
        process.wait()
        raise
    return started


def find_search(job: Path) -> SearchProcess | None:
    """A search that somebody else has started and that still runs; None if there is none.

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
    """What the exit code of a search was that ended while nobody was there to hear it; None if it
    was cut short, as far as one can tell."""
    if _marked(job).get("run") != run or not _is_whole(job / "result.json"):
        return None
    return 0 if (job / "mesh_rules.toml").exists() else 1


def run_of(job: Path) -> int:
    """The number of the last run that was started in a folder; 0 for none."""
    run = _marked(job).get("run", 0)
    return run if isinstance(run, int) else 0


def last_error(job: Path) -> str:
    """The last sentence of a search that ended badly; empty if there is none."""
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
    """The search that somebody else has started, if it is still the same process."""
    mark = _marked(job)
    with suppress(KeyError, TypeError, ValueError):
        pid = int(mark["pid"])
        if pid > 0 and abs(_created_s(pid) - float(mark["created_s"])) < 1.0:
            return pid
    # Who started it was killed before it could note the number: it is known by its command.
    word = f"--rules={job / 'mesh_rules.toml'}"
    for process in psutil.process_iter(["cmdline"]):
        if word in (process.info["cmdline"] or ()):
            return process.pid
    return None


def _created_s(pid: int) -> float:
    """When a process was started; 0 if it has ended already."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def _locked(job: Path) -> int | None:
    """Takes the lock of a submission's search; None while such a search lives."""
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
    """Whether a search has printed its result to the end."""
    with suppress(AutomeshError, ValueError, RecursionError):
        return bool(json.loads(read_bytes(path, limit_bytes=REMOTE_ANSWER_BYTES)))
    return False
