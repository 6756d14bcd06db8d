"""Whose turn it is to ask about a study: one study that ends the process that answers, or keeps it
busy, must not keep the others from being answered."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from automesh.errors import UsageError
from automesh_service.serve.reading.reader import Away, ReaderEnded, ReadingFailed

AGAIN_S = 60.0
"""Before a study is asked about again of which questions have ended the process twice in a row;
twice as long each time that another one has."""
LONGEST_S = 600.0
"""That at the most."""
TURN_S = 10.0
"""How long a question waits for another one about the same study."""
_ATTEMPTS = 2  # of one question, each with a new process
_MOST_WAITING = 8  # each of them keeps a thread of the server
_MOST_OF_ONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """How often a study in a row has ended the process that read it, and when it did last."""

    count: int
    last_s: float


class Asking:
    """The questions about studies that are at work, or wait; for any thread.

    A study is asked about one question at a time. Of those in the middle of whose questions the
    process has ended, only one at a time is asked about: so it is told whose question ends it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: Counter[str] = Counter()  # also those that wait
        self._at_work: set[str] = set()
        self._fatal: dict[str, Fatal] = {}

    def answer(self, name: str, ask: Callable[[], str]) -> str:
        """What a question about a study is answered with, when it is its turn. A process that ends
        meanwhile is waited for, once, if that was not this study's fault before.

        Args:
          ask: asks it.

        Raises:
          Away: too many wait, or such questions have ended the process again and again; or as
            `ask`, as everything else that it raises.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            with self._turn(name):
                try:
                    text = ask()
                except Away as error:
                    count = self._note(name) if error.is_suspect else 0
                    if attempt == _ATTEMPTS or count > 1 or not isinstance(error, ReaderEnded):
                        raise
                except (UsageError, ReadingFailed):
                    self.forget(name)
                    raise
                else:
                    self.forget(name)
                    return text
        raise AssertionError("unreachable")

    def forget(self, name: str) -> None:
        """Takes a study for harmless: it has given an answer, or is not there any more."""
        with self._changed:
            self._fatal.pop(name, None)

    def _note(self, name: str) -> int:
        """Counts that the process has ended in the middle of a question; returns how often."""
        with self._changed:
            former = self._fatal.get(name)
            count = 1 if former is None else former.count + 1
            self._fatal[name] = Fatal(count=count, last_s=time.monotonic())
        return count

    @contextmanager
    def _turn(self, name: str) -> Generator[None]:
        """Waits for the turn of a question, which it has while inside.

        Raises:
          Away: it does not come.
        """
        with self._changed:
            self._check(name)
            if self._there.total() >= _MOST_WAITING or self._there[name] >= _MOST_OF_ONE:
                raise Away(
                    "too many questions about studies are asked at once", hint="ask again soon"
                )
            self._there[name] += 1
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._is_free(name), TURN_S):
                    raise Away(
                        f"other questions about the study `{name}` are not answered yet",
                        hint="ask again in a minute",
                    )
                self._check(name)  # They may have ended the process meanwhile.
                self._at_work.add(name)
            try:
                yield
            finally:
                with self._changed:
                    self._at_work.remove(name)
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._there[name] -= 1
                if not self._there[name]:
                    del self._there[name]

    def _is_free(self, name: str) -> bool:
        is_suspect = name in self._fatal
        return name not in self._at_work and not (
            is_suspect and any(one in self._fatal for one in self._at_work)
        )

    def _check(self, name: str) -> None:
        """Raises Away if a study is not asked about just now."""
        one = self._fatal.get(name)
        if one is None or one.count < 2:
            return
        rest_s = min(LONGEST_S, AGAIN_S * 2.0 ** min(one.count - 2, 30))
        if time.monotonic() - one.last_s < rest_s:
            raise Away(
                f"the study `{name}` is not asked about for a while: in the middle of such "
                f"questions the process that reads studies has ended {one.count} times in a row",
                hint="ask again in ten minutes; the log of the service says why it has ended",
            )
