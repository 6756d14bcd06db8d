"""The two processes between the parent and a worker, which end the worker and all its descendants.

    parent -> deputy -> guardian -> worker -> whatever the user's script starts

This file runs as a script that imports nothing of automesh, so that it starts in milliseconds and
stays small. The guardian
* collects the worker's output into a log file of bounded size, which is its standard output,
* kills the worker with all its descendants when the parent asks (by closing the leash), when the
  parent dies, when the worker dies, or when they hold more memory than they may,
* reports on the leash, as one line of JSON, how the worker ended; if the report must outlive the
  parent, it is first written to a file. The process that starts the guardian opens both files, so
  the guardian opens no file by its name.
The deputy, the guardian's parent, sleeps and does the killing if the guardian cannot; so any of the
four may be killed at any time. The kernel helps: guardian and deputy are subreapers, so no
descendant can detach from both, and the kernel kills the worker when the guardian dies. Known
limit: if guardian and deputy are both killed within a tenth of a second, the worker ends too, but
background processes of the script stay. macOS has neither: there a double-forked child escapes, and
the deputy finds a worker whose guardian was killed only while it is still a descendant.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from io import RawIOBase
from pathlib import Path
from typing import NoReturn

import psutil

TICK_S = 0.05
SCAN_S = 1.0  # Interval of the search for new descendants, a walk over all processes.
DEPUTY_TICK_S = 0.25
OBEY_LIMIT_S = 0.5  # A guardian that has not reacted to the leash by then is stopped.
KILL_LIMIT_S = 5.0  # A process in uninterruptible sleep may not die: give up then.
CHUNK_BYTES = 2**20
HEAD_BYTES = 2**20
TAIL_BYTES = 2**20
LOG_LIMIT_BYTES = 4 * 2**20

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_F_SETPIPE_SZ = 1031  # linux/fcntl.h
_LIKELY_VICTIM = "900"  # Of 1000: if memory runs out, the kernel kills the worker, not the shell.
_IGNORED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_LINUX = sys.platform == "linux"


class BoundedLog:
    """A log file of limited size, which keeps the beginning and the end of the output."""

    def __init__(self, file: RawIOBase) -> None:
        self._file = file
        self._left_out_bytes = 0

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
            size = os.fstat(self._file.fileno()).st_size
            if size > LOG_LIMIT_BYTES:
                self._compact(size)
        except OSError:  # The disk is full; the job goes on without its log.
            self._left_out_bytes += len(data)

    def _compact(self, size: int) -> None:
        self._file.seek(size - TAIL_BYTES)
        tail = self._file.read(TAIL_BYTES) or b""
        self._left_out_bytes += size - HEAD_BYTES - TAIL_BYTES
        self._file.truncate(HEAD_BYTES)
        self._file.write(b"\n[... about %d bytes left out ...]\n" % self._left_out_bytes + tail)


class MemoryWatch:
    """Measures how much memory the descendants of this process hold together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._self = psutil.Process()
        self._known: list[psutil.Process] = []
        self._next_scan = 0.0

    def exceeds(self) -> bool:
        """Measures once; True if the limit is exceeded."""
        now = time.monotonic()
        if now >= self._next_scan:
            self._known = self._self.children(recursive=True)
            # With very many processes the walk is slow; it must not take more than 2 % of a core.
            self._next_scan = time.monotonic() + max(SCAN_S, 50 * (time.monotonic() - now))
        held = sum(_resident_bytes(process) for process in self._known)
        if held > self.limit_bytes and len(self._known) > 1:
            # Forked processes share pages, which the plain sum counts once for each process.
            held = sum(_proportional_bytes(process) for process in self._known)
        self.peak_bytes = max(self.peak_bytes, held)
        return held > self.limit_bytes


def _resident_bytes(process: psutil.Process) -> int:
    """Returns the resident memory of a process without pages of mapped files, which the kernel can
    drop."""
    own = _field_bytes(process.pid, "status", ("RssAnon", "RssShmem"))
    if own is not None:
        return own
    try:
        return process.memory_info().rss
    except psutil.Error:  # It has ended, or belongs to another user.
        return 0


def _proportional_bytes(process: psutil.Process) -> int:
    own = _field_bytes(process.pid, "smaps_rollup", ("Pss_Anon", "Pss_Shmem"))
    if own is not None:
        return own
    try:
        full = process.memory_full_info()
    except psutil.Error:
        return 0
    return getattr(full, "pss", full.uss)


def _field_bytes(pid: int, file: str, names: tuple[str, str]) -> int | None:
    """Returns the sum of two fields of a file in /proc (man 5 proc); None if it cannot be read: the
    process has ended or is not ours, or the kernel is old (RssAnon: Linux 4.5, Pss_Anon: 5.3)."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text(errors="replace").splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    if not all(name in fields for name in names):
        return None
    return 1024 * sum(int(fields[name].split()[0]) for name in names)


def _kernel_kills() -> int:
    """Returns how many processes the kernel's out-of-memory killer has ended since the machine
    booted."""
    if not _LINUX:
        return 0
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill":
            return int(value)
    return 0


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _prepare_worker(guardian: int, *, keeps: tuple[int, ...]) -> None:
    """Runs in the worker between fork and exec.

    Args:
      keeps: signals that the worker continues to ignore.
    """
    for number in _IGNORED:
        if number not in keeps:
            signal.signal(number, signal.SIG_DFL)
    if not _LINUX:
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:  # The guardian died before the line above took effect.
        os._exit(1)
    # Some sandboxes forbid this; it only matters when memory runs out.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_LIKELY_VICTIM)


class Guardian:
    """Starts one worker, watches it and ends it."""

    def __init__(
        self,
        *,
        deputy: int,
        leash: socket.socket,
        log: BoundedLog,
        memory: MemoryWatch,
        report: int,
    ) -> None:
        self._deputy = deputy
        self._leash = leash
        self._log = log
        self._memory = memory
        self._report = report
        self._kernel_kills = _kernel_kills()
        self._output, self._output_in = os.pipe()
        os.set_blocking(self._output, False)
        if _LINUX:
            with contextlib.suppress(OSError):  # A pipe of the default size is only slower.
                fcntl.fcntl(self._output, _F_SETPIPE_SZ, CHUNK_BYTES)
        self._worker = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._status: int | None = None

    def start(self, command: list[str], control: int) -> None:
        """Starts the worker.

        Args:
          control: descriptor that it inherits; -1 for none.
        """
        guardian = os.getpid()
        # Our worker handles SIGINT itself once it runs; before that, SIGINT must not end it.
        keeps = () if control < 0 else (signal.SIGINT,)
        worker = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output_in,
            stderr=self._output_in,
            pass_fds=() if control < 0 else (control,),
            preexec_fn=lambda: _prepare_worker(guardian, keeps=keeps),
        )
        # A reference is kept: `subprocess` would collect the exit code of a process whose object is
        # deleted.
        self._popen = worker
        self._worker = worker.pid
        if control >= 0:
            os.close(control)
        os.close(self._output_in)

    def watch(self, alarm: int) -> bool:
        """Waits until the worker must end; True if the reason is the memory limit."""
        selector = selectors.DefaultSelector()
        for fd in (self._leash, self._output, alarm):
            selector.register(fd, selectors.EVENT_READ)
        next_look = 0.0
        while True:
            ready = {key.fd for key, _ in selector.select(TICK_S)}
            if self._output in ready and not self._pump():
                selector.unregister(self._output)
            if alarm in ready:
                os.read(alarm, 4096)
                self._reap()
            if self._status is not None or self._leash.fileno() in ready:
                return False
            now = time.monotonic()
            if now < next_look:
                continue
            if os.getppid() != self._deputy:
                return False
            if self._memory.exceeds():
                return True
            # Measuring a very large worker is slow.
            next_look = time.monotonic() + max(TICK_S, 10 * (time.monotonic() - now))

    def end(self, *, over_limit: bool) -> None:
        """Kills all remaining processes, writes the rest of the log, and reports."""
        code = self._status  # None if this guardian ends the worker.
        kill_descendants()
        while self._pump():
            pass
        report = {
            "code": code,
            "over_limit": over_limit,
            "peak_bytes": self._memory.peak_bytes,
            "kernel_killed": code == -signal.SIGKILL and _kernel_kills() > self._kernel_kills,
        }
        line = json.dumps(report).encode() + b"\n"
        # Only if the worker ended by itself: one that is killed because the parent died has no
        # result.
        if self._report >= 0 and (code is not None or over_limit):
            # In one write: readers ignore a line without its end, as on a full disk.
            with contextlib.suppress(OSError):  # The leash still carries the report.
                os.write(self._report, line)
        with contextlib.suppress(OSError):  # The parent may be gone.
            self._leash.sendall(line)

    def _pump(self) -> bool:
        """Moves output into the log; False if there was none."""
        try:
            data = os.read(self._output, CHUNK_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._log.write(data)
        return bool(data)

    def _reap(self) -> None:
        self._status = reap().get(self._worker, self._status)


def reap() -> dict[int, int]:
    """Collects the exit codes of all children that have ended; negative for signals."""
    codes: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def kill_descendants() -> None:
    """Kills all descendants of this process, repeatedly until none is left."""
    me = psutil.Process()
    deadline = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < deadline:
        reap()
        left = me.children(recursive=True)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):  # Gone already.
                process.kill()
        time.sleep(TICK_S / 10)


def run_deputy(*, parent: int, leash: socket.socket, pulse: int, guardian: int) -> NoReturn:
    """Runs the deputy: waits until the guardian has ended, and does its work if it failed.

    Args:
      parent: pid of the process that started the deputy.
      leash: ends when the parent wants all processes killed.
      pulse: pipe that closes when the guardian ends.
      guardian: the guardian's pid.
    """
    give_up = float("inf")
    code = -signal.SIGSTOP  # It does not react to the leash.
    while time.monotonic() < give_up:
        waiting = [pulse, leash.fileno()] if give_up == float("inf") else [pulse]
        ready = select.select(waiting, [], [], DEPUTY_TICK_S)[0]
        if pulse in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(guardian, 0)[1])
            break
        if leash.fileno() in ready or os.getppid() != parent:
            give_up = min(give_up, time.monotonic() + OBEY_LIMIT_S)
    if code != 0:
        kill_descendants()
    os._exit(0)


def main(arguments: list[str]) -> NoReturn:
    """Runs deputy and guardian. The arguments: parent's pid, descriptors of leash and channel (-1
    for none), limit in bytes, descriptor of the report file (-1 for none), command. The log is
    standard output."""
    parent, leash_fd, control, limit_bytes, report = (int(argument) for argument in arguments[:5])
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(leash_fd, False)
    leash = socket.socket(fileno=leash_fd)
    pulse, pulse_in = os.pipe()
    deputy = os.getpid()
    _adopt_orphans()
    if guardian := os.fork():
        os.close(pulse_in)
        if control >= 0:
            os.close(control)
        run_deputy(parent=parent, leash=leash, pulse=pulse, guardian=guardian)
    os.close(pulse)
    _adopt_orphans()
    os.setsid()  # A signal that the script sends to its own group must not reach the deputy.
    alarm, alarm_in = os.pipe()
    for fd in (alarm, alarm_in):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(alarm_in, warn_on_full_buffer=False)

    # Without a buffer: all that was written is kept if this process is killed.
    log = BoundedLog(os.fdopen(os.dup(1), "r+b", buffering=0))
    memory = MemoryWatch(limit_bytes)
    guardian = Guardian(deputy=deputy, leash=leash, log=log, memory=memory, report=report)
    guardian.start(arguments[5:], control)
    guardian.end(over_limit=guardian.watch(alarm))
    os._exit(0)


def _adopt_orphans() -> None:
    """Makes this process the parent of descendants whose own parents end; forks do not inherit
    it."""
    if _LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    main(sys.argv[1:])
