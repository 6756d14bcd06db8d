"""The server's hold on the process that reads studies: started, spoken to, replaced when gone.

Whoever kills that process, or stops it, loses nothing: all that it keeps is what the server knows,
which its successor is told.
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
"""Questions that are at work at once; each has its own socket, and its own thread there."""
START_S = 300.0
"""For a process to begin: its imports take a second or two, and minutes on a machine whose cores
all do something else."""
SILENT_S = 40.0
"""Without a word in the middle of a look: it reads nothing itself, but the lock of a storage may
take 30 s. Shorter than what the server takes for fresh."""
QUESTION_S = 120.0
"""For the answer to one question, which it ends itself after `lanes.ANSWER_S`."""
BACK_S = 10.0
"""How long who asks waits for a process, or for a lane: it needs a second or two to start."""
MOST_KNOWN = 1000
"""Studies that a new process is told of in one message: what is sent at once has a bound."""
_LAST_WORDS = frozenset(("is_behind", "refused", "failed"))
_KILL_S = 10.0
_SOON = "ask again in a few seconds"
_LOG = logging.getLogger("automesh.serve")


class Away(UsageError):
    """Studies cannot be read now, but soon.

    Attributes:
      is_suspect: what was asked for may be why: in the middle of it the process that reads has
        ended by itself, or has said nothing for too long.
    """

    is_suspect: bool = False


class ReaderEnded(Away):
    """The process that reads has ended before it has answered."""


class ReadingFailed(Exception):
    """The process that reads studies has met an error that nobody has thought of, and logged it."""


@dataclass(kw_only=True)
class ReaderProcess:
    """One process that reads studies, and the server's ends of its sockets.

    Attributes:
      asking: questions that it has not answered; of one that has ended, those that it had not.
      is_meant: it was ended by the server.
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
    """Looks at all studies, and asks about one, in a process that is replaced when it is gone.

    Args:
      storage, pause_s: as of `automesh_service.serve.reading.scan.Scan`.
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
        """Of the process that is at work now; None while there is none."""
        current = self._current
        return current.process.pid if current is not None and current.is_alive else None

    def look(
        self,
        asked: Message,
        known: Callable[[], Mapping[str, Any]],
        hear: Callable[[Message], None],
    ) -> None:
        """Has the studies looked at once; for one thread, which starts the process if there is none
        and must live as long as the process shall: the kernel ends it with that thread.

        Args:
          asked: the arguments of `Scan.look`.
          known: what a new process is told of the studies, by name.
          hear: gets each message of `Scan.look` when it comes.

        Raises:
          Away: the process has ended, or says nothing; the next call starts another one.
          UsageError: the storage cannot be used.
          ReadingFailed: nobody has thought of why it cannot be.
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
                # In the middle of a question, too, it may be that one's fault.
                away.is_suspect = away.is_suspect and not current.asking
                raise away from None
            except TimeoutError:
                away = self._drop(current, f"it has said nothing for {SILENT_S:.0f} s")
                away.is_suspect = True
                raise away from None
            except BaseException:  # What comes next of it would be taken for something else.
                self._drop(current, "it was not listened to")
                raise
        _check(message)

    def ask(self, question: Message) -> str:
        """The text that answers a question; for any thread.

        Raises:
          Ended: the process has ended meanwhile; another one may answer.
          Away: there is no process that could answer, or it does not.
          UsageError: the study cannot be read, or has not what is asked for.
          ReadingFailed: nobody has thought of why.
        """
        current = self._wait_for_process()
        try:
            lane = self._free_lane(current)
        except LaneEnded:
            away = self._drop(current)
            away.is_suspect = False  # Nothing was asked yet.
            raise away from None
        message = self._ask(current, lane, question)
        if "unanswered" in message:
            # Who has waited for so long does not wait once more.
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
        with self._looking:  # It hears at once that the process is gone.
            self._forget_looks()

    def _ask(self, current: ReaderProcess, lane: Lane, question: Message) -> Message:
        with self._changed:
            current.asking += 1
        try:
            lane.send(question, QUESTION_S)
            message = lane.receive(QUESTION_S)
        except TimeoutError:
            lane.close()
            # Its thread there may wait for a lock for ever, and nobody else can end that.
            reason = f"it has not answered for {QUESTION_S:.0f} s"
            self._drop(current, reason)
            away = _away(
                reason
            )  # Not `ReaderEnded`: who has waited for so long does not wait once more.
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
                # In parts: nobody tells of the end of a process.
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
          Away: it has ended at once, or the server ends.
          OSError: the system does not let us start another process.
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
                # Its copies would not have the threads of a library for algebra.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=numbers,
                start_new_session=True,  # Ctrl-C is the server's.
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
        except BaseException:  # Nobody would know of it any more.
            self._drop(current, "it was not told what is known")
            raise
        with self._changed:  # Not before: it answers no question while it begins.
            self._starting = None
            self._current = None if current.is_dropped else current
            self._changed.notify_all()
        return current

    def _forget_looks(self) -> None:
        """Closes the socket of a former process, which only the thread that looks may do."""
        if self._looks_of is not None:
            self._looks_of.looks.close()
            self._looks_of = None

    def _drop(self, current: ReaderProcess, reason: str = "") -> ReaderEnded:
        """Kills a process, unless another thread has; returns what is to be raised: suspect is who
        was at work when it ended by itself.

        Args:
          reason: why; empty if it has ended by itself.
        """
        with self._changed:
            is_mine = not current.is_dropped
            current.is_dropped = True
            if is_mine:
                current.is_meant = bool(reason) or self._is_closed
            self._current = None if self._current is current else self._current
            self._starting = None if self._starting is current else self._starting
        current.process.kill()
        code: object = "that nobody knows"  # It may be in a sleep that nothing ends.
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = current.process.wait(_KILL_S)
        reason = reason or f"it has ended with code {code}"
        if is_mine:
            if not self._is_closed:
                _LOG.warning("the process that reads studies is replaced: %s", reason)
            current.leash.close()
            # Lanes that are in use are closed by who uses them: they are at their ends now.
            with contextlib.suppress(queue.Empty):
                while True:
                    current.lanes.get_nowait().close()
        ended = ReaderEnded(_text(reason), hint=_SOON)
        ended.is_suspect = not current.is_meant
        return ended


def _check(message: Message) -> None:
    """Raises what a message of the process tells of."""
    if "refused" in message:
        raise UsageError(str(message["refused"]), hint=str(message["hint"]))
    if "failed" in message:
        raise ReadingFailed(str(message["failed"]))


def _away(reason: str) -> Away:
    return Away(_text(reason), hint=_SOON)


def _text(reason: str) -> str:
    return f"studies cannot be read just now, as the process that does it is replaced: {reason}"
