"""How often somebody may ask, and how many may watch at once."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from automesh import limits

_MOST_KNOWN = 10_000
"""Who asks: of those who have not asked for the longest time nothing is remembered."""


@dataclass(slots=True)
class _Bucket:
    """A token bucket: what is left of the requests that may be made at once, and since when."""

    left: float
    since_s: float


class Limiter:
    """Token buckets, one for each who asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def known(self) -> int:
        """Of how many who asked something is remembered."""
        return len(self._buckets)

    def take(self, who: str) -> float:
        """Counts a request of the holder of a token.

        Returns:
          Seconds after which to come again; 0 if it may be made now.
        """
        return self._take(who, limits.REQUESTS_PER_S, limits.REQUESTS_AT_ONCE)

    def take_refusal(self, address: str) -> float:
        """Counts a request without a valid token, by where it came from; as `take`."""
        return self._take(f"@{address}", limits.REFUSALS_PER_S, limits.REFUSALS_AT_ONCE)

    def take_note(self, who: str) -> bool:
        """Whether a refusal is to be audited, by who was refused, or the address of a stranger: of
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
    """All streams of events that may be open at once are."""


class Watchers:
    """Streams of events that are open.

    Args:
      most: how many there may be, if that is less than `limits.WATCHERS`.
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
        """Counts a stream in.

        Raises:
          TooManyWatchers: there are too many, of this one or of all.
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
        """Counts a stream while inside; as `enter`."""
        self.enter(who)
        try:
            yield
        finally:
            self.leave(who)
