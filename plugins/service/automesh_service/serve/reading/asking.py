"""The order of questions about studies. A study that ends the process which answers, or keeps it
busy, must not block the questions about other studies."""

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
"""Seconds before a new question about a study whose questions have ended the process twice in a
row; doubled each time that another one does."""
LONGEST_S = 600.0
"""The longest pause before a new question about a study that has ended the process, in seconds."""
TURN_S = 10.0
"""Seconds that a question waits for another one about the same study."""
_ATTEMPTS = 2  # of one question, each with a new process
_MOST_WAITING = 8  # each waiting question keeps a thread of the server
_MOST_OF_ONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fatal:
    """A count of how often in a row a study has ended the process that read it, and when it last
    did."""

    count: int
    last_s: float


class Asking:
    """The questions about studies that are being answered, or wait; any thread may use it.

    Only one question about a study is answered at a time. If the process has ended during the
    questions about several studies, these are suspects, and only one suspect at a time gets a
    question: if the process then ends again, the culprit is known.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._there: Counter[str] = Counter()  # including questions that wait
        self._at_work: set[str] = set()
        self._fatal: dict[str, Fatal] = {}

    def answer(self, name: str, ask: Callable[[], str]) -> str:
        """Asks a question about a study when it is its turn, and returns the answer. If the process
        ends meanwhile, and this study has not ended it before, the question is repeated once with
        the next process.

        Args:
          ask: asks the question and returns the answer.

        Raises:
          Away: too many questions wait, or questions about this study have ended the process again
            and again; or `ask` has raised it. Other exceptions of `ask` are raised as well.
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
        """Removes a study from the suspects: it has given an answer, or does not exist any more."""
        with self._changed:
            self._fatal.pop(name, None)

    def _note(self, name: str) -> int:
        """Counts that the process has ended during a question about a study; returns how often in a
        row."""
        with self._changed:
            former = self._fatal.get(name)
            count = 1 if former is None else former.count + 1
            self._fatal[name] = Fatal(count=count, last_s=time.monotonic())
        return count

    @contextmanager
    def _turn(self, name: str) -> Generator[None]:
        """Waits for the turn of a question, and keeps it while the body of the `with` runs.

        Raises:
          Away: the turn does not come in time.
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
                self._check(name)  # The questions before this one may have ended the process.
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
        """Raises Away while questions about a study are paused."""
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
