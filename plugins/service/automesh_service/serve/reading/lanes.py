"""Reads several studies at once, each in a process of its own, and with a bound of its own."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from automesh.errors import AutomeshError
from automesh.tuner.study.storage import parse_storage
from automesh.tuner.study.study import open_study
from automesh_service.serve.reading.forks import Fork, ForkFailed, Forks
from automesh_service.serve.reading.messages import Lane, LaneEnded, Message, TooLong, to_message
from automesh_service.serve.reading.questions import answer_of
from automesh_service.serve.reading.read import Found, StudyReader
from automesh_service.serve.reading.scan import QUICK_S, READ_S, Reading

QUICK = 3
"""Studies that are read at once. While one of them takes its whole time, the others continue."""
ANSWER_S = 60.0
"""Seconds for the answer to a question about one study. The locks of a study alone may take 30
s."""
# The scale ends at 1000: without free memory the kernel should kill this process and not the
# server.
_LIKELY_VICTIM = "500"


@dataclass(frozen=True, order=True, slots=True, kw_only=True)
class _Job:
    """A study that will be read; those with the fewest failures come first."""

    failures: int
    number: int
    name: str = field(compare=False)
    found: Found = field(compare=False)


class AnsweringProcess:
    """The process that answers questions; it is replaced when it does not answer."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._fork: Fork | None = None

    def ask(self, question: Message, limit_s: float) -> Message:
        """Asks as `Fork.ask` does. If no new process can be made, ends this process: the server
        replaces it."""
        if self._fork is None:
            try:
                self._fork = self._forks.make()
            except ForkFailed:
                os._exit(1)
        try:
            return self._fork.ask(question, limit_s)
        except BaseException:
            self._fork.kill()
            self._fork = None
            raise


class Lanes:
    """Reads studies: `QUICK` at once, and one of the slow ones in addition.

    Args:
      quick_s, slow_s: how long the reading of one study may take.
    """

    def __init__(self, forks: Forks, *, quick_s: float = QUICK_S, slow_s: float = READ_S) -> None:
        self._forks = forks
        self._quick: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._slow: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._ended: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._room = threading.Semaphore(QUICK)
        for number in range(QUICK + 1):
            is_slow = number == QUICK
            arguments = (self._slow if is_slow else self._quick, slow_s if is_slow else quick_s)
            threading.Thread(target=self._read_all, args=(*arguments, is_slow), daemon=True).start()

    def has_room(self) -> bool:
        """Whether the reading of a study would begin at once."""
        if self._room.acquire(blocking=False):
            self._room.release()
            return True
        return False

    def begin(self, name: str, found: Found, *, is_slow: bool, failures: int) -> None:
        """Has a study read; only called by the thread that calls `has_room`."""
        job = _Job(failures=failures, number=next(self._numbers), name=name, found=found)
        if is_slow:
            self._slow.put(job)
        else:
            self._room.acquire()
            self._quick.put(job)

    def ended(self, limit_s: float) -> Reading | None:
        """Waits for the next reading that ends; returns None if none ends within `limit_s`."""
        with suppress(queue.Empty):
            return self._ended.get(timeout=limit_s) if limit_s else self._ended.get_nowait()
        return None

    def _read_all(self, jobs: queue.PriorityQueue[_Job], limit_s: float, is_slow: bool) -> None:
        asked = AnsweringProcess(self._forks)
        while True:
            job = jobs.get()
            began_s = time.monotonic()
            said, reason = None, ""
            try:
                answered = asked.ask({"read": job.name, **_to_message(job.found)}, limit_s)
                said = answered.get("study")
                reason = "the process that read it has met an error: its log says which"
            except TimeoutError:
                reason = f"it could not be read within {limit_s:.0f} s"
            except LaneEnded:
                reason = "reading it has ended the process that read it, twice in a row"
            took_s = time.monotonic() - began_s
            self._ended.put(Reading(name=job.name, took_s=took_s, said=said, reason=reason))
            if not is_slow:
                self._room.release()


def answer(asked: AnsweringProcess, question: Message) -> Message:
    """Returns the answer to a question about one study, or why there is none."""
    try:
        return asked.ask({"question": question}, ANSWER_S)
    except TimeoutError:
        return {"unanswered": f"it has not answered for {ANSWER_S:.0f} s", "is_late": True}
    except LaneEnded:
        return {"unanswered": "it has ended", "is_late": False}


def work(storage: str, lane: Lane) -> None:
    """Answers messages until the other side closes the socket; runs in each process that reads
    studies.

    Raises:
      LaneEnded: the other side has closed it.
    """
    with suppress(OSError):  # Some sandboxes forbid it, and only Linux has it.
        Path("/proc/self/oom_score_adj").write_text(_LIKELY_VICTIM)
    reader = StudyReader(storage)
    while True:
        asked = lane.receive()
        try:
            if "question" in asked:
                said: Message = {"text": answer_of(asked["question"])}
            else:
                found = _from_message(asked)
                said = {"study": to_message(reader.read(str(asked["read"]), found))}
        except Exception as error:  # noqa: BLE001  The server sends the error to the client.
            said = refusal(error)
        try:
            lane.send(said)
        except TooLong as error:
            lane.send(refusal(error))


def warm_up() -> None:
    """Reads an empty study, so that the forks of this process have all modules: half of them are
    only imported when a storage is opened, and each fork would import them again."""
    # If the disk has no room for it, the first reading of each fork takes longer.
    with suppress(OSError, AutomeshError), TemporaryDirectory(prefix="automesh-reader-") as folder:
        place = Path(folder) / "empty"
        place.mkdir()
        with open_study(parse_storage("", place), place.name, source_hash="", versions=()):
            pass
        StudyReader("").read(place.name, Found(folder=place, storage="", stamp="", changed_s=0.0))


def refusal(error: Exception) -> Message:
    """Returns the message to the server about an error; logs an unexpected one."""
    if isinstance(error, AutomeshError):
        return {"refused": error.message, "hint": error.hint}
    traceback.print_exception(error)
    return {"failed": type(error).__name__}


def _to_message(found: Found) -> Message:
    return {
        "folder": str(found.folder),
        "storage": found.storage,
        "stamp": found.stamp,
        "changed_s": found.changed_s,
    }


def _from_message(said: dict[str, Any]) -> Found:
    return Found(
        folder=Path(said["folder"]),
        storage=str(said["storage"]),
        stamp=str(said["stamp"]),
        changed_s=float(said["changed_s"]),
    )
