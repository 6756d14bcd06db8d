"""Processes that start within milliseconds and can be killed without harm: each reads studies for a
while.

A parent process, which has imported all modules that are needed to read a study, makes them by
`fork`. It has one thread and does nothing else, so no lock is held at the time of the fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

from automesh_service.serve.reading.messages import Lane, LaneEnded, Message

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BEGIN_S = 20.0
"""Seconds for a fork to begin; it normally takes milliseconds."""
_ASK = b"."


class ForkFailed(Exception):
    """No further process can be made."""


@dataclass(kw_only=True)
class Fork:
    """A process that answers one message after another; one thread at a time may use it."""

    lane: Lane
    pid: int
    handle: int | None

    def ask(self, question: Message, limit_s: float) -> Message:
        """Sends a question and returns the answer.

        Raises:
          LaneEnded: the process has ended.
          TimeoutError: no answer comes within `limit_s`; the caller must kill the process.
        """
        self.lane.send(question, limit_s)
        return self.lane.receive(limit_s)

    def kill(self) -> None:
        """Kills the process."""
        with suppress(ProcessLookupError):
            if self.handle is not None:  # Another process may have its number by now.
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        if self.handle is not None:
            os.close(self.handle)
        self.lane.close()


@dataclass(kw_only=True)
class Forks:
    """Makes processes; any thread may use it.

    Attributes:
      pid: the id of the process that forks.
    """

    pid: int
    _socket: socket.socket
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self) -> Fork:
        """Makes one process.

        Raises:
          ForkFailed: the process that forks is gone, or stopped.
        """
        mine, theirs = socket.socketpair()
        lane = Lane(mine)
        try:
            with theirs, self._lock:
                socket.send_fds(self._socket, [_ASK], [theirs.fileno()])
            pid = int(lane.receive(_BEGIN_S)["pid"])
            handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        except (OSError, LaneEnded) as error:
            lane.close()
            raise ForkFailed(str(error)) from None
        return Fork(lane=lane, pid=pid, handle=handle)


def start_forks(work: Callable[[Lane], None], inherited: Sequence[int]) -> Forks:
    """Starts the process that forks, before this one has a second thread.

    Args:
      work: the function that each fork runs with its end of a socket, until the other end is
        closed.
      inherited: descriptors of this process that the forks must close.
    """
    mine, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            mine.close()
            tie_to(parent)
            for one in inherited:
                os.close(one)
            _make_all(theirs, work)
        finally:
            os._exit(1)
    theirs.close()
    return Forks(pid=pid, _socket=mine)


def tie_to(parent: int) -> None:
    """Makes the kernel kill this process when the thread that has started it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent died before the line above took effect.
        os._exit(1)


def _make_all(asked: socket.socket, work: Callable[[Lane], None]) -> NoReturn:
    """Makes a process for each request."""
    me = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, len(_ASK), 1)
        if not data:
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            try:
                asked.close()
                tie_to(me)
                lane = Lane(socket.socket(fileno=descriptors[0]))
                with suppress(LaneEnded):
                    lane.send({"pid": os.getpid()})
                    work(lane)
            finally:
                os._exit(1)
        for one in descriptors:
            os.close(one)
