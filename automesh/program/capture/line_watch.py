"""Notes which line of a script runs, and whether jax compiles or computes there (no jax).

The progress of a search shows the line; if the process is killed, for its memory or its time, the
error names it. A thread looks at the stack of the thread that runs the script, and writes the
innermost line of the user's code into a file that is mapped into memory. So it opens no file while
the script runs, whose files are watched.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from automesh.foreign.private import is_own_folder, read_own
from automesh.package import is_users_file
from automesh.program.capture.nouns import SourceLine
from automesh.reading import Unreadable

_FILE = "line"
_BYTES = 1024
_EVERY_S = 0.25
# Modules of jax 0.10.1 to 0.12.0.1: the one that compiles, and those that run a compiled function
# and wait for its result. A function that runs has no frames below the hook that calls it. With
# another version of jax the line is named alone.
_COMPILER = str(Path("jax", "_src", "compiler.py"))
_RUNNERS = (
    str(Path("jax", "_src", "array.py")),
    str(Path("jax", "_src", "interpreters", "pxla.py")),
    str(Path("automesh", "program", "capture", "hooks.py")),
)

Doing = Literal["", "compiles", "computes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningLine:
    """The line of the user's code that runs.

    Attributes:
      line: as `train.py:12`.
      doing: whether jax compiles, or computes, what this line calls; empty for neither.
    """

    line: str
    doing: Doing = ""

    def __str__(self) -> str:
        return f"{self.line}, which jax {self.doing}" if self.doing else self.line


@contextmanager
def line_noted(folder: str) -> Generator[None]:
    """Keeps the line that this thread runs in a file of a folder while the body runs.

    Args:
      folder: of the stored step; empty to note nothing.
    """
    if not folder or not is_own_folder(Path(folder)):
        yield
        return
    descriptor = os.open(Path(folder) / _FILE, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.ftruncate(descriptor, _BYTES)
        shown = mmap.mmap(descriptor, _BYTES)
    finally:
        os.close(descriptor)
    ended = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(threading.get_ident(), shown, ended), daemon=True, name="line watch"
    )
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()
        shown.close()


def last_line(folder: str) -> RunningLine | None:
    """Returns the last line that was noted; None if there is none."""
    if not folder:
        return None
    try:
        noted = read_own(Path(folder) / _FILE, limit_bytes=_BYTES)
    except Unreadable:  # The error is shown without a line.
        return None
    line, _, doing = noted.rstrip(b"\0").decode(errors="replace").partition("\n")
    known: dict[str, Doing] = {"compiles": "compiles", "computes": "computes"}
    return RunningLine(line=line, doing=known.get(doing, "")) if line else None


def _watch(thread: int, shown: mmap.mmap, ended: threading.Event) -> None:
    last = ""
    interpreter: Any = sys
    while not ended.wait(_EVERY_S):
        frame = interpreter._current_frames().get(thread)
        doing: Doing = ""
        if frame is not None and frame.f_code.co_filename.endswith(_RUNNERS):
            doing = "computes"
        while frame is not None and not is_users_file(frame.f_code.co_filename):
            if frame.f_code.co_filename.endswith(_COMPILER):
                doing = "compiles"
            frame = frame.f_back
        if frame is None:
            continue
        here = f"{SourceLine(file=frame.f_code.co_filename, line=frame.f_lineno)}\n{doing}"
        if here != last:
            last = here
            shown[:] = here.encode()[: _BYTES - 1].ljust(_BYTES, b"\0")
