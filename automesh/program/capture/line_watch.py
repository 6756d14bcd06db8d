"""Notes which line of a script runs (no jax).

If the process is killed, for its memory or its time, the search reads the line and names it. A
thread looks at the stack of the thread that runs the script, and writes the innermost line of the
user's code into a file that is mapped into memory. So it opens no file while the script runs, whose
files are watched.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from automesh.foreign.private import is_own_folder, read_own
from automesh.package import is_users_file
from automesh.program.capture.nouns import SourceLine
from automesh.reading import Unreadable

_FILE = "line"
_BYTES = 1024
_EVERY_S = 0.25


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


def last_line(folder: str) -> str:
    """Returns the last line that was noted, as `train.py:12`; empty if there is none."""
    path = Path(folder) / _FILE
    if not folder or not path.exists():
        return ""
    try:
        noted = read_own(path, limit_bytes=_BYTES)
    except Unreadable:  # The error is shown without a line.
        return ""
    return noted.rstrip(b"\0").decode(errors="replace")


def _watch(thread: int, shown: mmap.mmap, ended: threading.Event) -> None:
    last = ""
    interpreter: Any = sys
    while not ended.wait(_EVERY_S):
        frame = interpreter._current_frames().get(thread)
        while frame is not None and not is_users_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            continue
        here = str(SourceLine(file=frame.f_code.co_filename, line=frame.f_lineno))
        if here != last:
            last = here
            shown[:] = here.encode()[: _BYTES - 1].ljust(_BYTES, b"\0")
