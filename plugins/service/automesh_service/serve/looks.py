"""One look for all who watch the same: two hundred readers of a search cost as much as one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from anyio import to_thread

_FRESH = 0.8
"""Of the time between two looks of one reader, in which the others take over what was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookResult:
    """What was seen.

    Attributes:
      text: JSON.
      sign: a hash of the text.
      is_over: nothing will come any more unless somebody goes on with it.
    """

    text: str
    sign: str
    is_over: bool


@dataclass(slots=True, kw_only=True)
class _Look:
    """A look that has begun, with the clock then, and how many watch."""

    readers: int = 0
    began_s: float = float("-inf")
    task: asyncio.Task[LookResult | None] | None = None


class Looks:
    """The looks at everything that is watched. Used by the thread of the event loop alone."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, _Look] = {}

    def __len__(self) -> int:
        """How many things are watched."""
        return len(self._looks)

    def view(self, key: Hashable, read: Callable[[], LookResult | None]) -> View:
        """What one reader watches.

        Args:
          key: the same for readers who may see the same, and see it.
          read: takes a look, in a thread; None if there is nothing to be seen any more.
        """
        return View(self._looks, key, read)


class View:
    """A look that one reader shares with all who have the same key."""

    def __init__(
        self, looks: dict[Hashable, _Look], key: Hashable, read: Callable[[], LookResult | None]
    ) -> None:
        self._looks, self._key, self._read = looks, key, read

    async def look(self, every_s: float) -> LookResult | None:
        """What is seen now, or was a moment ago by another reader.

        Args:
          every_s: between two looks of one reader.
        """
        look = self._looks.setdefault(self._key, _Look())
        look.readers += 1
        try:
            now_s = time.monotonic()
            if look.task is None or now_s - look.began_s >= _FRESH * every_s:
                look.began_s = now_s
                look.task = asyncio.create_task(to_thread.run_sync(self._read))
            # A reader who leaves does not take the look away from the others.
            return await asyncio.shield(look.task)
        finally:
            look.readers -= 1
            if look.readers == 0:
                loop = asyncio.get_running_loop()
                loop.call_later(2 * every_s, self._forget, look, look.began_s)

    def _forget(self, look: _Look, began_s: float) -> None:
        """Drops a look after which nobody has taken one."""
        if look.began_s == began_s and look.readers == 0 and self._looks.get(self._key) is look:
            del self._looks[self._key]
