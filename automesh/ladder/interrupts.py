"""Ctrl-C at a moment when nothing is half done."""

from __future__ import annotations

import selectors
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

_TICK_S = 0.02
_PATIENCE_S = 0.5


@contextmanager
def interrupts_at_rest() -> Generator[None]:
    """While inside, Ctrl-C raises `KeyboardInterrupt` where this thread waits for its workers.

    Python alone raises it wherever the thread happens to be: in the middle of a write to the study,
    or in a callback of the garbage collector, where it is printed and lost. A wait comes within
    milliseconds; if none does for half a second, it is raised all the same. Does nothing in other
    threads than the main one, or if somebody handles SIGINT already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    press = _Press()
    alarm = signal.signal(signal.SIGALRM, press.on_signal)
    signal.signal(signal.SIGINT, press.on_signal)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, alarm)


class _Press:
    """One press of Ctrl-C; an alarm that returns every few milliseconds looks for the moment."""

    def __init__(self) -> None:
        self._pressed_s = 0.0
        self._is_raised = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._is_raised:
            raise KeyboardInterrupt  # The clean-up takes too long for them.
        now_s = time.monotonic()
        if not self._pressed_s:
            self._pressed_s = now_s
            signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
        is_waiting = frame is not None and frame.f_code.co_filename == selectors.__file__
        if not self._is_raised and (is_waiting or now_s - self._pressed_s >= _PATIENCE_S):
            self._is_raised = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt
