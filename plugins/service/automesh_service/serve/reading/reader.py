"""The server's side of the process that reads studies: starts it, exchanges messages with it,
replaces it when it is gone.

Nothing is lost if that process is killed or stopped: the server knows all that it knew, and sends
it to the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from automesh.errors import UsageError
from automesh_service.serve.reading.messages import Lane, LaneEnded, Message

LANES = 4
"""Questions that are answered at once; each has its own socket, and its own thread in the
process."""
START_S = 300.0
"""Seconds for a process to begin: its imports take a second or two, and minutes on a busy
machine."""
SILENT_S = 40.0
"""Seconds without a message in the middle of a look. The process itself reads nothing, but the lock
of a storage may take 30 s. Must be shorter than the time after which the list counts as old."""
QUESTION_S = 120.0
"""Seconds for the answer to one question; the process itself gives up after `lanes.ANSWER_S`."""
BACK_S = 10.0
"""Seconds that a question waits for a process, or for a free lane; a process needs a second or two
to start."""
MOST_KNOWN = 1000
"""Studies in one message to a new process: the size of a message is bounded."""
_LAST_WORDS = frozenset(("is_behind", "refused", "failed"))
_KILL_S = 10.0
_SOON = "ask again in a few seconds"
_LOG = logging.getLogger("automesh.serve")


class Away(UsageError):
    """Studies cannot be read now, but probably soon.

    Attributes:
      is_suspect: whether the question may be the cause: while it was being answered, the process
        that reads has ended by itself, or has sent nothing for too long.
    """

    is_suspect: bool = False


class ReaderEnded(Away):
    """The process that reads has ended before it has answered."""


class ReadingFailed(Exception):
    """The process that reads studies has met an unexpected error, and logged it."""


@dataclass(kw_only=True)
class ReaderProcess:
    """One process that reads studies, and the server's ends of its sockets.

    Attributes:
      asking: number of questions that it has not answered; after its end, those that it had not.
      is_meant: whether the server has ended it.
    """

    process: subprocess.Popen[bytes]
    leash: socket.socket
    looks: Lane
    lanes: queue.LifoQueue[Lane]
    asking: int = 0
    is_dropped: bool = False
    is_meant: bool = False

    @property
    def is_alive(self) -> bool:
        return not self.is_dropped and self.process.poll() is None


@dataclass(kw_only=True)
class Reader:
    """Lists all studies, and asks questions about one, in a process that is replaced when it is
    gone.

    Args:
      storage, pause_s: as for `automesh_service.serve.reading.scan.Scan`.
    """

    storage: str
    pause_s: float
    _current: ReaderProcess | None = None
    _starting: ReaderProcess | None = None
    _looks_of: ReaderProcess | None = None
    _is_closed: bool = False
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def pid(self) -> int | None:
        """The id of the process that works now; None while there is none."""
        current = self._current
        return current.process.pid if current is not None and current.is_alive else None

    def look(
        self,
        asked: Message,
        known: Callable[[], Mapping[str, Any]],
        hear: Callable[[Message], None],
    ) -> None:
        """Lets the process list and read the studies once. Starts it if there is none. Only one
        thread may call this, and it must live as long as the process shall: the kernel kills the
        process with that thread.

        Args:
          asked: the arguments of `Scan.look`.
          known: returns what a new process needs about each study, by name.
          hear: is called with each message of `Scan.look` when it arrives.

        Raises:
          Away: the process has ended, or sends nothing; the next call starts another one.
          UsageError: the storage cannot be used.
          ReadingFailed: an unexpected error occurred.
          OSError: no process can be started.
        """
        with self._looking:
            current = self._process_for_looks(known)
            try:
                current.looks.send(asked, SILENT_S)
                message: Message = {}
                while not message.keys() & _LAST_WORDS:
                    message = current.looks.receive(SILENT_S)
                    hear(message)
            except LaneEnded:
                away = self._drop(current)
                # If questions were being answered as well, one of these may be the cause.
                away.is_suspect = away.is_suspect and not current.asking
                raise away from None
            except TimeoutError:
                away = self._drop(current, f"it has said nothing for {SILENT_S:.0f} s")
                away.is_suspect = True
                raise away from None
            # Later messages of this process would be mistaken for answers to the next look.
            except BaseException:
                self._drop(current, "it was not listened to")
                raise
        _check(message)

    def ask(self, question: Message) -> str:
        """Sends a question and returns the text that answers it; any thread may call it.

        Raises:
          ReaderEnded: the process has ended meanwhile; another one may answer.
          Away: there is no process that could answer, or it does not answer.
          UsageError: the study cannot be read, or does not have what the question asks for.
          ReadingFailed: an unexpected error occurred.
        """
        current = self._wait_for_process()
        try:
            lane = self._free_lane(current)
        except LaneEnded:
            away = self._drop(current)
            away.is_suspect = False  # The question was not sent yet.
            raise away from None
        message = self._ask(current, lane, question)
        if "unanswered" in message:
            # A late answer is not waited for a second time.
            kind = Away if message["is_late"] else ReaderEnded
            unanswered = kind(_text(str(message["unanswered"])), hint=_SOON)
            unanswered.is_suspect = True
            raise unanswered
        _check(message)
        return str(message["text"])

    def close(self) -> None:
        """Ends the process."""
        with self._changed:
            self._is_closed = True
            there = [one for one in (self._current, self._starting) if one is not None]
            self._changed.notify_all()
        for one in there:
            self._drop(one)
        with self._looking:  # The thread that looks notices at once that the process is gone.
            self._forget_looks()

    def _ask(self, current: ReaderProcess, lane: Lane, question: Message) -> Message:
        with self._changed:
            current.asking += 1
        try:
            lane.send(question, QUESTION_S)
            message = lane.receive(QUESTION_S)
        except TimeoutError:
            lane.close()
            # Its thread in the process may wait for a lock for ever, and only a kill ends that.
            reason = f"it has not answered for {QUESTION_S:.0f} s"
            self._drop(current, reason)
            # Not `ReaderEnded`: the question has waited so long that it is not repeated.
            away = _away(reason)
            away.is_suspect = True
            raise away from None
        except LaneEnded:
            lane.close()
            raise self._drop(current) from None
        except BaseException:
            lane.close()
            with self._changed:
                current.asking -= 1
            raise
        with self._changed:
            current.asking -= 1
            if current.is_dropped:
                lane.close()
            else:
                current.lanes.put(lane)
        return message

    def _free_lane(self, current: ReaderProcess) -> Lane:
        end_s = time.monotonic() + BACK_S
        while not current.is_dropped:
            with contextlib.suppress(queue.Empty):
                return current.lanes.get(timeout=0.2)
            if time.monotonic() > end_s:
                raise _away("it is busy with other questions")
        raise LaneEnded

    def _wait_for_process(self) -> ReaderProcess:
        end_s = time.monotonic() + BACK_S
        with self._changed:
            while self._current is None or not self._current.is_alive:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or self._is_closed:
                    raise _away("it has ended, and another one has not started yet")
                # In short waits: the end of a process does not wake this thread.
                self._changed.wait(min(left_s, 0.2))
            return self._current

    def _process_for_looks(self, known: Callable[[], Mapping[str, Any]]) -> ReaderProcess:
        current = self._current
        if current is not None and not current.is_alive:
            self._drop(current)
            current = None
        return current or self._start(known())

    def _start(self, known: Mapping[str, Any]) -> ReaderProcess:
        """Starts a process.

        Raises:
          Away: the process has ended at once, or the server ends.
          OSError: the system refuses to start another process.
        """
        self._forget_looks()
        if self._is_closed:
            raise _away("the server ends")
        with contextlib.ExitStack() as mine, contextlib.ExitStack() as theirs:
            leash, looks, *lanes = ends = [socket.socketpair() for _ in range(2 + LANES)]
            for one, other in ends:
                mine.callback(one.close)
                theirs.callback(other.close)
            numbers = [other.fileno() for _, other in ends]
            words = [sys.executable, "-P", "-m", "automesh_service.serve.reading.process"]
            process = subprocess.Popen(
                [*words, str(os.getpid()), *map(str, numbers)],
                # A fork does not get the threads of a BLAS library, so it must not start any.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=numbers,
                start_new_session=True,  # Ctrl-C ends only the server.
            )
            mine.pop_all()
        current = ReaderProcess(
            process=process, leash=leash[0], looks=Lane(looks[0]), lanes=queue.LifoQueue()
        )
        for one, _ in lanes:
            current.lanes.put(Lane(one))
        self._looks_of = current
        with self._changed:
            is_closed = self._is_closed
            self._starting = None if is_closed else current
        if is_closed:
            raise self._drop(current, "the server ends")
        try:
            current.looks.send({"storage": self.storage, "pause_s": self.pause_s}, START_S)
            names = list(known)
            for begin in range(0, len(names), MOST_KNOWN):
                part = {name: known[name] for name in names[begin : begin + MOST_KNOWN]}
                current.looks.send({"known": part}, START_S)
            current.looks.send({"known": {}}, START_S)
            current.looks.receive(START_S)
        except LaneEnded:
            raise self._drop(current) from None
        except TimeoutError:
            raise self._drop(current, f"it has not begun for {START_S:.0f} s") from None
        except BaseException:  # Nothing would use this process any more.
            self._drop(current, "it was not told what is known")
            raise
        with self._changed:  # Only now: while it begins it answers no question.
            self._starting = None
            self._current = None if current.is_dropped else current
            self._changed.notify_all()
        return current

    def _forget_looks(self) -> None:
        """Closes the socket of a former process; only the thread that looks may do this."""
        if self._looks_of is not None:
            self._looks_of.looks.close()
            self._looks_of = None

    def _drop(self, current: ReaderProcess, reason: str = "") -> ReaderEnded:
        """Kills a process, unless another thread has. Returns the exception to raise; it marks the
        question as suspect if the process has ended by itself.

        Args:
          reason: why it is killed; empty if it has ended by itself.
        """
        with self._changed:
            is_mine = not current.is_dropped
            current.is_dropped = True
            if is_mine:
                current.is_meant = bool(reason) or self._is_closed
            self._current = None if self._current is current else self._current
            self._starting = None if self._starting is current else self._starting
        current.process.kill()
        code: object = "that nobody knows"  # The process may be in an uninterruptible sleep.
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = current.process.wait(_KILL_S)
        reason = reason or f"it has ended with code {code}"
        if is_mine:
            if not self._is_closed:
                _LOG.warning("the process that reads studies is replaced: %s", reason)
            current.leash.close()
            # The threads that use the other lanes close them: they see the end of the process now.
            with contextlib.suppress(queue.Empty):
                while True:
                    current.lanes.get_nowait().close()
        ended = ReaderEnded(_text(reason), hint=_SOON)
        ended.is_suspect = not current.is_meant
        return ended


def _check(message: Message) -> None:
    """Raises the error that a message of the process contains."""
    if "refused" in message:
        raise UsageError(str(message["refused"]), hint=str(message["hint"]))
    if "failed" in message:
        raise ReadingFailed(str(message["failed"]))


def _away(reason: str) -> Away:
    return Away(_text(reason), hint=_SOON)


def _text(reason: str) -> str:
    return f"studies cannot be read just now, as the process that does it is replaced: {reason}"
