"""Searches on a machine that does other work: times may be too unsteady for a verdict, or the
budget over before one. A search then says so, with the hint to run it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

GO_ON = ("run the same command again: it goes on", "run the same command again to go on")
_TRIES = 5
_T = TypeVar("_T")


def until_decided(search: Callable[[], _T], words: Callable[[_T], str]) -> _T:
    """Runs a search until it comes to a verdict, five times at most.

    Args:
      search: runs it, and may begin anew each time.
      words: what it has said on stderr.
    """
    for _ in range(_TRIES - 1):
        done = search()
        if not any(hint in words(done) for hint in GO_ON):
            return done
    return search()
