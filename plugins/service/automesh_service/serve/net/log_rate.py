"""Bounds for the log, so that clients who cause thousands of records a second do not fill the
disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

_AT_ONCE = 20
_PER_S = 0.2
_MOST_KNOWN = 200
_LOGGERS = ("uvicorn.error", "asyncio", "automesh.serve")


@dataclass(slots=True, kw_only=True)
class _Source:
    """A line of code that logs: how many records it may still make at once, since when, and how
    many were dropped."""

    left: float
    since_s: float
    left_out: int = 0


class LogRate(logging.Filter):
    """Passes the first `_AT_ONCE` records of one line of code, and then one every few seconds,
    which has the number of dropped ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._sources: OrderedDict[tuple[str, int, str], _Source] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = self._clock()
        key = (record.pathname, record.lineno, str(record.msg)[:40])
        with self._lock:
            source = self._sources.pop(key, None) or _Source(left=_AT_ONCE, since_s=now_s)
            self._sources[key] = source
            if len(self._sources) > _MOST_KNOWN:
                self._sources.popitem(last=False)
            source.left = min(_AT_ONCE, source.left + (now_s - source.since_s) * _PER_S)
            source.since_s = now_s
            if source.left < 1.0:
                source.left_out += 1
                return False
            source.left -= 1.0
            left_out, source.left_out = source.left_out, 0
        if left_out:
            record.msg = f"{record.getMessage()} (and {left_out} times more, not logged)"
            record.args = None
        return True


@contextmanager
def bounded_log() -> Generator[None]:
    """Bounds what the server, the event loop and uvicorn log while the body of the `with` runs."""
    rate = LogRate()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for one in loggers:
        one.addFilter(rate)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(rate)
