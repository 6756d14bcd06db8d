"""Finds the line of the user's code that asks for something, and the name of a jitted function."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from automesh.package import is_users_file
from automesh.program.capture.nouns import SourceLine

# The attributes in which wrappers keep the function that they wrap: functools, Flax NNX, Haliax.
_WRAPPED = ("__wrapped__", "func", "f", "_fun", "fn")


_THREAD = threading.local()


@contextmanager
def thread_started_at(place: SourceLine) -> Generator[None]:
    """Makes `place` the asking line where a thread runs a library's code alone in the body."""
    _THREAD.started_at = place
    yield


def asking_line() -> SourceLine:
    """Returns the innermost line of the user's code that is being run; in a thread that runs a
    library's code alone, the line of the user's code that had it started."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return SourceLine(file=frame.f_code.co_filename, line=frame.f_lineno)
        frame = frame.f_back
    return getattr(_THREAD, "started_at", SourceLine())


def failing_line(traceback: TracebackType | None) -> SourceLine:
    """Returns the innermost line of the user's code in a traceback."""
    found = SourceLine()
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_users_file(file):
            found = SourceLine(file=file, line=traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def describe_function(function: Any) -> tuple[str, SourceLine]:
    """Returns the name of a function under its wrappers, and the line where its code begins."""
    name, place = "", SourceLine()
    for part in _unwrapped(function):
        name = getattr(part, "__name__", "") or name
        code: Any = getattr(part, "__code__", None)
        if code is not None and is_users_file(code.co_filename):
            return name, SourceLine(file=code.co_filename, line=code.co_firstlineno)
    return name or type(function).__name__, place


def _unwrapped(function: Any) -> list[Any]:
    found: list[Any] = []
    while function is not None and len(found) < 16:
        found.append(function)
        if inspect.ismethod(function):
            function = function.__func__
            continue
        if isinstance(function, functools.partial):
            function = function.func
            continue
        inside = [getattr(function, name, None) for name in _WRAPPED]
        function = next((one for one in inside if callable(one)), None)
    return found
