"""Limits for the number of requests of one client, and for the number of open streams."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from automesh import limits

_MOST_KNOWN = 10_000
"""The most buckets that are kept: those that were not used for the longest time are dropped."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket: how many requests may be made at once, and since when."""

    left: float
    since_s: float


class Limiter:
    """Token buckets, one for each client."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def known(self) -> int:
        """The number of buckets that are kept."""
        return len(self._buckets)

    def take(self, who: str) -> float:
        """Counts a request of the holder of a token.

        Returns:
          Seconds after which the client may try again; 0 if the request may be made now.
        """
        return self._take(who, limits.REQUESTS_PER_S, limits.REQUESTS_AT_ONCE)

    def take_refusal(self, address: str) -> float:
        """Counts a request without a valid token, for the address that sent it; returns as
        `take`."""
        return self._take(f"@{address}", limits.REFUSALS_PER_S, limits.REFUSALS_AT_ONCE)

    def take_note(self, who: str) -> bool:
        """Whether a refusal is to be audited, for the holder or the address that was refused: of
        thousands a second the first few are enough."""
        return not self._take(f"#{who}", limits.REFUSALS_PER_S, limits.REFUSALS_AT_ONCE)

    def _take(self, who: str, per_s: float, at_once: float) -> float:
        now_s = self._clock()
        with self._lock:
            bucket = self._buckets.pop(who, None) or _Bucket(at_once, now_s)
            self._buckets[who] = bucket
            if len(self._buckets) > _MOST_KNOWN:
                self._buckets.popitem(last=False)
            bucket.left = min(at_once, bucket.left + (now_s - bucket.since_s) * per_s)
            bucket.since_s = now_s
            if bucket.left >= 1.0:
                bucket.left -= 1.0
                return 0.0
            return (1.0 - bucket.left) / per_s


class TooManyWatchers(Exception):
    """The allowed number of streams of events is open already."""


class Watchers:
    """The open streams of events.

    Args:
      most: how many may be open, if that is less than `limits.WATCHERS`.
    """

    def __init__(self, most: int = limits.WATCHERS) -> None:
        self._most = most
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        with self._lock:
            return self._open.total()

    def enter(self, who: str) -> None:
        """Counts a stream that opens.

        Raises:
          TooManyWatchers: this client has too many, or all clients together have.
        """
        with self._lock:
            is_full = self._open.total() >= min(self._most, limits.WATCHERS)
            if is_full or self._open[who] >= limits.WATCHERS_OF_ONE:
                raise TooManyWatchers
            self._open[who] += 1

    def leave(self, who: str) -> None:
        with self._lock:
            self._open[who] -= 1
            if self._open[who] <= 0:
                del self._open[who]

    @contextmanager
    def one(self, who: str) -> Generator[None]:
        """Counts a stream while the body of the `with` runs; raises as `enter`."""
        self.enter(who)
        try:
            yield
        finally:
            self.leave(who)
