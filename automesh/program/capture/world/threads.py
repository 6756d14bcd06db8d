"""Threads that a script has started end when its run is over (no jax)."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager

_ENDED: set[int] = set()


@contextmanager
def ended_with_the_run() -> Generator[None]:
    """Threads that the body starts, and that are there when it ends, end at what they do next with
    jax or with files."""
    before = {one.ident for one in threading.enumerate()}
    _ENDED.intersection_update(one for one in before if one is not None)
    try:
        yield
    finally:
        _ENDED.update(
            one.ident for one in threading.enumerate() if one.ident and one.ident not in before
        )


def end_foreign_thread() -> None:
    """Ends a thread that a script has started whose run is over.

    Raises:
      SystemExit: this is one; Python lets such a thread end without a word.
    """
    if _ENDED and threading.get_ident() in _ENDED:
        raise SystemExit
