"""Threads that a script has started end when its run is over, and none of them ends the process
(no jax)."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

_ENDED: set[int] = set()
# Runs that are going on.
_RUNS = [0]
_leave = os._exit


@contextmanager
def ended_with_the_run() -> Generator[None]:
    """Threads that the body starts, and that are there when it ends, end at what they do next with
    jax or with files."""
    _hook_exit(os.getpid())
    before = {one.ident for one in threading.enumerate()}
    _ENDED.intersection_update(one for one in before if one is not None)
    _RUNS[0] += 1
    try:
        yield
    finally:
        _RUNS[0] -= 1
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


def _hook_exit(process: int) -> None:
    """Makes `os._exit` what `sys.exit` is while a script is run, and for its threads behind the
    end of the run: it would end automesh's process. Processes that the script forks end as ever."""
    if os._exit is not _leave:
        return

    def leave(status: int) -> NoReturn:
        is_running = _RUNS[0] > 0
        if os.getpid() == process and (is_running or threading.get_ident() in _ENDED):
            raise SystemExit(status)
        _leave(status)

    os._exit = leave
