"""Shared looks: two hundred readers of one search cost as much as one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from anyio import to_thread

_FRESH = 0.8
"""Share of the time between two looks of one reader, within which other readers reuse the
result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookResult:
    """The result of a look.

    Attributes:
      text: the state as JSON.
      sign: a hash of the text.
      is_over: whether nothing will change any more unless somebody resumes the search.
    """

    text: str
    sign: str
    is_over: bool


@dataclass(slots=True, kw_only=True)
class _Look:
    """A look that has begun, the time when it began, and the number of its readers."""

    readers: int = 0
    began_s: float = float("-inf")
    task: asyncio.Task[LookResult | None] | None = None


class Looks:
    """The looks at everything that is watched. Only the thread of the event loop uses them."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, _Look] = {}

    def __len__(self) -> int:
        """Returns how many things are watched."""
        return len(self._looks)

    def view(self, key: Hashable, read: Callable[[], LookResult | None]) -> View:
        """Returns the view of one reader.

        Args:
          key: the same for readers that may see the same thing and watch it.
          read: reads the state, in a thread; returns None if the thing is gone.
        """
        return View(self._looks, key, read)


class View:
    """A look that all readers with the same key share."""

    def __init__(
        self, looks: dict[Hashable, _Look], key: Hashable, read: Callable[[], LookResult | None]
    ) -> None:
        self._looks, self._key, self._read = looks, key, read

    async def look(self, every_s: float) -> LookResult | None:
        """Returns the state now, or the one that another reader got a moment ago.

        Args:
          every_s: seconds between two looks of one reader.
        """
        look = self._looks.setdefault(self._key, _Look())
        look.readers += 1
        try:
            now_s = time.monotonic()
            if look.task is None or now_s - look.began_s >= _FRESH * every_s:
                look.began_s = now_s
                look.task = asyncio.create_task(to_thread.run_sync(self._read))
            # If this reader leaves, the look goes on for the others.
            return await asyncio.shield(look.task)
        finally:
            look.readers -= 1
            if look.readers == 0:
                loop = asyncio.get_running_loop()
                loop.call_later(2 * every_s, self._forget, look, look.began_s)

    def _forget(self, look: _Look, began_s: float) -> None:
        """Drops the look, unless a reader has used it since `began_s`."""
        if look.began_s == began_s and look.readers == 0 and self._looks.get(self._key) is look:
            del self._looks[self._key]
