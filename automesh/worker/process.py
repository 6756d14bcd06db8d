"""Starts and ends a process under its guardian: a worker, or a command of the user."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from automesh.errors import AutomeshError
from automesh.files import open_log
from automesh.jsonio import read_json
from automesh.outcomes import Failed, Failure, OutOfMemory, TimedOut
from automesh.platforms.allowed import check_files
from automesh.reading import Unreadable, open_regular
from automesh.texts.terminal import clean_lines
from automesh.worker import blame, protocol
from automesh.worker.environment import environment
from automesh.worker.messages import Surroundings
from automesh.worker.protocol import Answer
from automesh.worker.run_time import RunTime, run_time_below
from automesh.worker.wire import Message, ParentEnd

_GUARDIAN = Path(__file__).with_name("guardian.py")
_LAST_LINE = re.compile(rb"\n--- job \d+ has failed$", re.MULTILINE)
_TAIL_BYTES = 2**16
_TAIL_LINES = 40
_TAIL_CHARS = 6000
# An idle guardian writes the log within milliseconds.
_LOG_LIMIT_S, _LOG_LOOK_S = 5.0, 0.005
# Signals by which somebody ends a process, as opposed to a fault of its own.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_HEADING = re.compile(rb"^--- .* ---\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a worker process.

    Attributes:
      code: its exit code, negative for a signal; None if it is unknown.
      over_limit: True if the guardian killed it because it held too much memory.
      kernel_killed: True if the kernel's out-of-memory killer ended it.
      peak_bytes: highest measured memory of the process and its descendants.
    """

    code: int | None
    over_limit: bool = False
    kernel_killed: bool = False
    peak_bytes: int = 0

    @property
    def by_stranger(self) -> bool:
        """Whether somebody else than the kernel or automesh killed it or its guardian."""
        killed = self.code is None or -self.code in _FROM_OUTSIDE
        return killed and not self.over_limit and not self.kernel_killed

    def outcome(self, *, stage: str, memory_limit_bytes: int) -> Failure:
        """Returns the failure of the job that the worker was doing, in `stage`, when it ended."""
        if self.over_limit or self.kernel_killed:
            by, work = "the kernel" if self.kernel_killed else "automesh", blame.stage_words(stage)
            return OutOfMemory(
                stage=stage,
                needed_bytes=self.peak_bytes,
                limit_bytes=memory_limit_bytes,
                detail=f"killed by {by} because of its host memory while {work}",
                is_host=True,
            )
        if self.code == protocol.CHANNEL_LOST:
            return Failed(stage=stage, reason=protocol.NO_CHANNEL)
        return Failed(stage=stage, reason=blame.ended(self.code, stage))


class Waitable(Protocol):
    """An object with a descriptor that a selector can wait for."""

    def fileno(self) -> int: ...


class Channel(Waitable, Protocol):
    """The parent's end of the channel to a worker; see `automesh.worker.wire.ParentEnd`."""

    ended: bool

    @property
    def has_unsent(self) -> bool: ...
    def send(self, message: Message) -> None: ...
    def flush(self) -> None: ...
    def receive(self) -> list[Message]: ...


class Running(Protocol):
    """A worker as its pool sees it: a process, or a gang of processes that act as one.

    Attributes:
      log: file for its output; a gang has one in the same folder for each rank.
    """

    log: Path

    @property
    def leash(self) -> Waitable: ...
    @property
    def channel(self) -> Channel: ...
    def kill(self) -> None: ...
    def kill_deputy(self) -> None: ...
    def has_ended(self) -> bool: ...
    def run_time(self) -> RunTime:
        """Returns the processor time of its process so far; zeros if it is not known here."""
        ...

    def collect_ending(self) -> Ending: ...
    def with_log(self, result: Answer | Failure, last_line: str = "", /) -> Answer | Failure:
        """Adds the tail of the log to a failure without one; `last_line` as in
        `Guarded.log_tail`."""
        ...


class StartWorker(Protocol):
    """Starts a worker; the arguments are those of `Process`.

    Raises:
      OSError: it cannot be started.
    """

    def __call__(
        self, *, surroundings: Surroundings, log: Path, memory_limit_bytes: int, handler: str
    ) -> Running: ...


class Guarded:
    """A command under its guardian, in a session of its own, so that Ctrl-C does not reach it.

    Args:
      command: executable and arguments.
      variables: environment of the command and its guardian.
      log: file for its output.
      memory_limit_bytes: limit of the command and its descendants together.
      control: a socket that the command inherits; None for none.
      report: open file, for use after this process ends, into which the guardian writes how the
        command ended if it ended by itself; None for none.

    Raises:
      OSError: the system does not let us start another process.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        log: Path,
        memory_limit_bytes: int,
        control: socket.socket | None = None,
        report: Path | None = None,
    ) -> None:
        check_files()
        self.log = log
        self._report = b""
        self.leash, leash_end = socket.socketpair()
        # -P: Python must not import a `signal.py` or `json.py` from the user's working directory.
        guard = [sys.executable, "-P", str(_GUARDIAN), str(os.getpid()), str(leash_end.fileno())]
        guard += [str(control.fileno() if control else -1), str(memory_limit_bytes)]
        try:
            with ExitStack() as files:
                files.enter_context(leash_end)
                own_output = files.enter_context(open_log(log))
                told = files.enter_context(open_log(report)).fileno() if report else -1
                kept = [leash_end.fileno(), *([control.fileno()] if control else [])]
                self._deputy = subprocess.Popen(
                    [*guard, str(told), *command],
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=own_output,
                    stderr=own_output,
                    pass_fds=[*kept, *([told] if report else [])],
                    start_new_session=True,
                )
        except BaseException:
            self.leash.close()
            raise
        self.leash.setblocking(False)

    @property
    def deputy_pid(self) -> int:
        """Pid of the deputy, whose descendants are all processes that were started."""
        return self._deputy.pid

    def run_time(self) -> RunTime:
        """See `Running`."""
        return run_time_below(self._deputy.pid)

    def kill(self) -> None:
        """Asks the guardian to kill all processes; the leash ends when it has done so."""
        try:
            self.leash.shutdown(socket.SHUT_WR)
        except OSError:  # The guardian has ended already.
            return

    def kill_deputy(self) -> None:
        """Kills a deputy that is stopped or stuck, so that the guardian does all the killing."""
        self._deputy.kill()

    def has_ended(self) -> bool:
        """Reads the leash; True once it has ended, when all processes have ended."""
        try:
            data = self.leash.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._report += data
        return not data

    def collect_ending(self) -> Ending:
        """Closes all descriptors, after `has_ended` was True; returns how the command ended."""
        self._deputy.wait()
        self.leash.close()
        # No report: the guardian was killed, and the deputy took over.
        return read_ending(self._report) or Ending(code=None)

    def log_tail(self, last_line: str = "") -> str:
        """Returns the last lines of the command's log; see the function `log_tail`.

        Args:
          last_line: last line of the failed job's output, to wait for: the failure can arrive
            before that output, which goes through the guardian. Empty for none.
        """
        deadline_s = time.monotonic() + _LOG_LIMIT_S
        while last_line and not _has_line(self.log, last_line) and time.monotonic() < deadline_s:
            time.sleep(_LOG_LOOK_S)
        return log_tail(self.log)


class Process(Guarded):
    """A worker process: a command under a guardian, with a channel to it.

    Args:
      surroundings: environment of the worker.
      log: file for its output.
      memory_limit_bytes: limit of the worker and its descendants together.
      handler: module that does the jobs.

    Raises:
      OSError: the system does not let us start another process.
    """

    def __init__(
        self, *, surroundings: Surroundings, log: Path, memory_limit_bytes: int, handler: str
    ) -> None:
        channel, control = socket.socketpair()
        arguments = [str(control.fileno()), str(memory_limit_bytes), handler]
        with control:
            try:
                super().__init__(
                    [sys.executable, "-P", "-m", "automesh.worker.child", *arguments],
                    variables=environment(os.environ, surroundings),
                    log=log,
                    memory_limit_bytes=memory_limit_bytes,
                    control=control,
                )
            except BaseException:
                channel.close()
                raise
        self.channel = ParentEnd(channel)

    def collect_ending(self) -> Ending:
        """Closes all descriptors, after `has_ended` was True; returns how the worker ended."""
        ending = super().collect_ending()
        self.channel.close()
        return ending

    def with_log(self, result: Answer | Failure, last_line: str = "", /) -> Answer | Failure:
        """See `Running`."""
        match result:
            case Failed(log_tail="") | TimedOut(log_tail=""):
                return replace(result, log_tail=self.log_tail(last_line))
            case _:
                return result


def read_ending(report: bytes) -> Ending | None:
    """Reads the report of a guardian; None if there is none."""
    if not report.endswith(b"\n"):
        return None
    try:
        return read_json(report, Ending)
    except AutomeshError:  # Another program has written it, so the ending is unknown.
        return None


def log_tail(log: Path) -> str:
    """Returns the last lines of a log without control characters; for a worker, those of its last
    job."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except (OSError, Unreadable) as error:
        return f"(the log cannot be read: {error})"
    own = _LAST_LINE.sub(b"", _HEADING.split(data)[-1])
    last_job = own.decode(errors="replace")
    # Keeps the last state of a progress bar.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in last_job.rstrip().split("\n")]
    text = "\n".join(lines[-_TAIL_LINES:])
    return clean_lines(text)[-_TAIL_CHARS:]


def _has_line(log: Path, line: str) -> bool:
    """Whether a line is near the end of a log; True for a log that cannot be read."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return f"{line}\n".encode() in file.read(_TAIL_BYTES)
    except (OSError, Unreadable):
        return True


def clear_logs(folder: Path, *, keep: int) -> None:
    """Removes all but the newest logs of earlier processes, since a search may be resumed many
    times."""
    logs: list[tuple[float, Path]] = []
    for path in folder.glob("worker-*.log"):
        with contextlib.suppress(FileNotFoundError):  # Another search may be removing it, too.
            logs.append((path.stat().st_mtime, path))
    for _, path in sorted(logs)[:-keep]:
        path.unlink(missing_ok=True)
