"""How long a command waits for a service, and what it shows meanwhile.

Within two seconds it says which service it waits for, why, and until when. It gives up soon if
nothing has ever answered at the address. It waits longer for a service that has answered before,
because that one may be restarting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from automesh import limits
from automesh.errors import UsageError
from automesh.texts.terminal import clean

_PAUSE_S = 1.0
_LOG = logging.getLogger("automesh.remote")
_T = TypeVar("_T")
BUSY = (429, 503)
"""Statuses by which a service asks the client to try again later."""


class Unreachable(UsageError):
    """Nothing answers, or the connection broke; this may change in a moment.

    Attributes:
      is_lasting: whether it will not change in a moment if nothing has answered so far, as with a
        wrong name.
    """

    def __init__(self, message: str, *, hint: str = "", is_lasting: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.is_lasting = is_lasting


class RefusedRequest(UsageError):
    """The service refused the request.

    Attributes:
      status: the HTTP status.
    """

    def __init__(self, message: str, *, hint: str = "", status: int) -> None:
        super().__init__(message, hint=hint)
        self.status = status


def _to_log(line: str) -> None:
    _LOG.warning("automesh: %s", line)


@dataclass(kw_only=True)
class Patience:
    """The time that one client waits, which depends on how the service has answered so far.

    Attributes:
      say: shows a line to the user; by default a warning in the log.
      has_answered: whether the service has answered at least once.
    """

    say: Callable[[str], None] = _to_log
    has_answered: bool = False
    _is_slow: bool = False

    @contextmanager
    def news(self, what: str, most_s: float) -> Generator[None]:
        """Says that the command waits, if the body of the `with` takes long; once for several slow
        answers in a row.

        Args:
          what: the thing that the command waits for.
          most_s: the most seconds that it can take.
        """
        line = f"waiting for {what}, for {most_s:.0f} s at most"
        timer = threading.Timer(limits.REMOTE_NEWS_S, self._say_slow, (line,))
        timer.daemon = True
        timer.start()
        began_s = time.monotonic()
        try:
            yield
        finally:
            timer.cancel()
        if time.monotonic() - began_s < limits.REMOTE_NEWS_S:
            self._is_slow = False

    def _say_slow(self, line: str) -> None:
        if not self._is_slow:
            self._is_slow = True
            self.say(line)

    def until_answered(self, ask: Callable[[], _T]) -> _T:
        """Repeats a request while nothing answers; only for requests that may be sent twice.

        Raises:
          Unreachable: nothing has answered for too long.
          RefusedRequest: the service refuses, or has been busy for too long.
        """
        began_s = time.monotonic()
        told = ""
        while True:
            try:
                found = ask()
            except (Unreachable, RefusedRequest) as error:
                left_s = began_s + self._patience_s(error) - time.monotonic()
                if left_s <= 0:
                    raise
                if error.message != told:
                    told = error.message
                    self.say(f"{clean(told)}; trying again for {left_s:.0f} s")
            else:
                if told:
                    self.say("it answers")
                return found
            time.sleep(min(_PAUSE_S, left_s))

    def _patience_s(self, error: Unreachable | RefusedRequest) -> float:
        if isinstance(error, RefusedRequest):
            return limits.REMOTE_BACK_S if error.status in BUSY else 0.0
        if self.has_answered:
            return limits.REMOTE_BACK_S
        return 0.0 if error.is_lasting else limits.REMOTE_FIRST_S
