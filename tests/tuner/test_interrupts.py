"""Ctrl-C is neither lost nor raised in the middle of something."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from automesh.tuner.interrupts import exit_code, interrupts_at_rest


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)]
    # Another test's command line may have asked for it in this process.
    on_term = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, on_term)
    assert signal.getsignal(signal.SIGALRM) == before[1]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def raised_within(least_s: float, most_s: float) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        yield
    assert least_s <= time.monotonic() - began < most_s


def wait(limit_s: float) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, selectors.DefaultSelector() as selector:
        selector.register(ours, selectors.EVENT_READ)
        selector.select(limit_s)


class PressedInDel:
    def __del__(self) -> None:
        press()


def test_python_alone_loses_it(capsys: pytest.CaptureFixture[str]) -> None:
    # What this module is for; if Python mends it, the module can go.
    lost: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda one: lost.append(one.exc_type)
    try:
        PressedInDel()
        gc.collect()
        wait(0.1)
    finally:
        sys.unraisablehook = hook
    assert lost == [KeyboardInterrupt]


def test_it_is_raised_in_the_next_wait() -> None:
    done: list[str] = []
    # Hypothesis listens to the collector once it has run in this process, and would be interrupted.
    others = gc.callbacks[:]
    gc.callbacks.clear()
    gc.freeze()  # or a collection takes as long as all the tests before have left objects
    with raised_within(0.0, 0.4), interrupts_at_rest():
        PressedInDel()
        gc.collect()
        done.append("what was going on is finished")
        wait(30)
        done.append("the wait is not")
    gc.unfreeze()
    gc.callbacks.extend(others)
    assert done == ["what was going on is finished"]


def test_a_wait_ends_at_once() -> None:
    with raised_within(0.1, 0.4), interrupts_at_rest():
        threading.Timer(0.1, press).start()
        wait(30)


def test_without_a_wait_it_comes_after_half_a_second() -> None:
    with raised_within(0.5, 1.5), interrupts_at_rest():
        press()
        while True:
            time.sleep(0.001)


def test_once_only_while_cleaning_up() -> None:
    with interrupts_at_rest():
        try:
            press()
            wait(30)
        except KeyboardInterrupt:
            wait(0.2)  # As a pool does that kills its workers.
        with pytest.raises(KeyboardInterrupt):
            press()
            time.sleep(1)


def test_two_quick_presses_are_one() -> None:
    with interrupts_at_rest():
        press()
        press()
        with pytest.raises(KeyboardInterrupt):
            wait(30)
        wait(0.2)


def test_the_handlers_are_given_back() -> None:
    with interrupts_at_rest():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        press()
        time.sleep(1)


def test_somebody_elses_handler_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    with interrupts_at_rest():
        press()
        wait(0.1)
    assert seen == [signal.SIGINT]


def test_in_another_thread_nothing_is_touched() -> None:
    handlers: list[object] = []

    def look() -> None:
        with interrupts_at_rest():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


def test_sigterm_is_left_alone_unless_the_command_line_asks() -> None:
    """A program that calls the API and is told to end must end."""
    with interrupts_at_rest():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert exit_code() == 130


def test_sigterm_of_the_command_line_is_an_interrupt_with_a_code_of_its_own() -> None:
    code = (
        "import os, signal, selectors, socket, sys\n"
        "from automesh.tuner.interrupts import *\n"
        "end_on_sigterm()\n"
        "a, b = socket.socketpair(); s = selectors.DefaultSelector()\n"
        "s.register(a, selectors.EVENT_READ)\n"
        "try:\n"
        "    with interrupts_at_rest():\n"
        "        os.kill(os.getpid(), signal.SIGTERM); s.select(30)\n"
        "except KeyboardInterrupt:\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); s.select(30)\n"
        "    except KeyboardInterrupt:\n"
        "        sys.exit(exit_code())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 143
