"""Processes that are made in milliseconds, and killed without harm: each reads studies for a while.

A process that has imported all that is needed to read a study makes them, as its copies. It has one
thread and does nothing else, so a copy of it is whole.
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
"""For a copy to begin: milliseconds, as a rule."""
_ASK = b"."


class ForkFailed(Exception):
    """No process can be made any more."""


@dataclass(kw_only=True)
class Fork:
    """A process that answers, one message after another; for one thread at a time."""

    lane: Lane
    pid: int
    handle: int | None

    def ask(self, question: Message, limit_s: float) -> Message:
        """The answer to a question.

        Raises:
          LaneEnded: the process has ended.
          TimeoutError: there is none within `limit_s`; the process is to be killed.
        """
        self.lane.send(question, limit_s)
        return self.lane.receive(limit_s)

    def kill(self) -> None:
        """Ends it, whatever it does."""
        with suppress(ProcessLookupError):
            if self.handle is not None:  # Its number may be that of another process by now.
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)
        if self.handle is not None:
            os.close(self.handle)
        self.lane.close()


@dataclass(kw_only=True)
class Forks:
    """Makes processes; for any thread.

    Attributes:
      pid: of the process that makes them.
    """

    pid: int
    _socket: socket.socket
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self) -> Fork:
        """Makes one.

        Raises:
          ForkFailed: the process that makes them is gone, or stopped.
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
    """Starts the process that makes others, before this one has a second thread.

    Args:
      work: what each of them does with its end of a conversation, until that ends.
      inherited: descriptors of this process that none of them must keep open.
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
    """Lets the kernel end this process with the thread that has made it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the line above took effect.
        os._exit(1)


def _make_all(asked: socket.socket, work: Callable[[Lane], None]) -> NoReturn:
    """Makes a process as often as it is asked for one."""
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
