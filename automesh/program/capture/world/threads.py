"""Ends the threads that a script has started when its run is over, and keeps them from ending the
process (no jax)."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

_ENDED: set[int] = set()
# The runs in progress.
_RUNS = [0]
_leave = os._exit


@contextmanager
def ended_with_the_run() -> Generator[None]:
    """Makes each thread that the body has started, and that still runs when the body ends, end at
    its next use of jax or of files."""
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
    """Ends the calling thread if a script has started it whose run is over.

    Raises:
      SystemExit: this is such a thread; Python ends it without a message.
    """
    if _ENDED and threading.get_ident() in _ENDED:
        raise SystemExit


def _hook_exit(process: int) -> None:
    """Makes `os._exit` act like `sys.exit` while a script is run, and for its threads after the
    run, as it would end automesh's process. Processes that the script forks end as usual."""
    if os._exit is not _leave:
        return

    def leave(status: int) -> NoReturn:
        is_running = _RUNS[0] > 0
        if os.getpid() == process and (is_running or threading.get_ident() in _ENDED):
            raise SystemExit(status)
        _leave(status)

    os._exit = leave
