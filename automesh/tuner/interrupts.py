"""Handles Ctrl-C, and SIGTERM of the command line, at a moment when no write is half done."""

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


def end_on_sigterm() -> None:
    """Lets SIGTERM end this process as Ctrl-C does: the process shows what is known so far, and how
    to go on.

    Only the command line calls this: a program that calls the API must still end at SIGTERM.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def exit_code() -> int:
    """Returns the exit code of an interrupted process: 143 after SIGTERM, 130 after Ctrl-C."""
    return 128 + (signal.SIGTERM if _TERMINATED else signal.SIGINT)


_TERMINATED: list[int] = []


def _on_sigterm(number: int, _: FrameType | None) -> None:
    _TERMINATED.append(number)
    raise KeyboardInterrupt


@contextmanager
def interrupts_at_rest() -> Generator[None]:
    """Lets Ctrl-C, while the body runs, raise `KeyboardInterrupt` only where this thread waits for
    its workers.

    Python itself raises it anywhere: in the middle of a write to the study, or in a callback of the
    garbage collector, where it is printed and lost. The thread normally waits within milliseconds;
    if it does not for half a second, the exception is raised in any case. Does nothing in other
    threads than the main one, or if SIGINT already has another handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    press = _Press()
    alarm = signal.signal(signal.SIGALRM, press.on_signal)
    signal.signal(signal.SIGINT, press.on_signal)
    hears_sigterm = signal.getsignal(signal.SIGTERM) is _on_sigterm
    if hears_sigterm:
        signal.signal(signal.SIGTERM, press.on_signal)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if hears_sigterm:
            signal.signal(signal.SIGTERM, _on_sigterm)
        signal.signal(signal.SIGALRM, alarm)


class _Press:
    """One press of Ctrl-C; a timer that fires every few milliseconds checks whether the thread
    waits."""

    def __init__(self) -> None:
        self._pressed_s = 0.0
        self._is_raised = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            _TERMINATED.append(number)
        if number != signal.SIGALRM and self._is_raised:
            raise KeyboardInterrupt  # The user does not want to wait for the clean-up.
        now_s = time.monotonic()
        if not self._pressed_s:
            self._pressed_s = now_s
            signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
        is_waiting = frame is not None and frame.f_code.co_filename == selectors.__file__
        if not self._is_raised and (is_waiting or now_s - self._pressed_s >= _PATIENCE_S):
            self._is_raised = True
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt
