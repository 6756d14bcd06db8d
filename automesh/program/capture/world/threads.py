"""The threads that a script starts (no jax).

They work in the modes of the run, as jax keeps modes apart for each thread. What ends the run ends
it from each of them. When it is over they end, and they cannot end the process.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

from automesh.program.capture.frames import asking_line, thread_started_at
from automesh.program.capture.nouns import SourceLine

_ENDED: set[int] = set()
# Wakes the main thread where it waits for a thread that has ended the run. By default nothing
# happens at this signal, and no script is known to use it.
_WAKES = signal.SIGURG
# The runs in progress.
_RUNS = [0]
_leave = os._exit


@contextmanager
def ended_with_the_run(
    *,
    modes: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ends: tuple[type[BaseException], ...] = (),
) -> Generator[None]:
    """Makes each thread that the body has started, and that still runs when the body ends, end at
    its next use of jax or of files.

    Args:
      modes: puts the modes of the run in force in a thread of the body when it begins.
      ends: errors that end the body even if a thread of it raises them, since the body may be
        waiting for that thread.
    """
    _hook_exit(os.getpid())
    before = {one.ident for one in threading.enumerate()}
    _ENDED.intersection_update(one for one in before if one is not None)
    _RUNS[0] += 1
    try:
        with _started_threads(modes, ends):
            yield
    finally:
        _RUNS[0] -= 1
        _ENDED.update(
            one.ident for one in threading.enumerate() if one.ident and one.ident not in before
        )


@contextmanager
def _started_threads(
    modes: Callable[[], AbstractContextManager[Any]], ends: tuple[type[BaseException], ...]
) -> Generator[None]:
    start, waiting = threading.Thread.start, threading.get_ident()
    raised: list[BaseException] = []
    is_main = threading.current_thread() is threading.main_thread()

    def run_of(run: Callable[[], None], place: SourceLine) -> None:
        with modes(), thread_started_at(place):
            try:
                run()
            except ends as error:
                if not is_main or threading.get_ident() in _ENDED:
                    raise
                raised.append(error)
                signal.pthread_kill(waiting, _WAKES)

    @functools.wraps(start)
    def begin(thread: threading.Thread) -> None:
        if os.getpid() == process:
            thread.run = functools.partial(run_of, thread.run, asking_line())
        start(thread)

    def wake(*_: Any) -> None:
        if raised and owner.start is begin:  # The run is not over yet.
            raise raised[0]

    process, owner = os.getpid(), vars(threading)["Thread"]
    owner.start = begin
    before = signal.signal(_WAKES, wake) if is_main else None
    try:
        yield
    finally:
        owner.start = start
        if is_main:
            signal.signal(_WAKES, before or signal.SIG_DFL)


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
