"""How often a script was started in a search: once is the rule, and more than three times is told.

Every process that starts it appends a line to a file in the folder of the stored step.
"""

from __future__ import annotations

import os
from pathlib import Path

_FILE = "starts"


def note_start(folder: str, why: str) -> None:
    """Notes that the script is about to be started.

    Args:
      folder: of the stored step; empty: nobody counts.
      why: `first run`, `second run`, `winner`, or the mesh for which it is started.
    """
    if not folder or not Path(folder).is_dir():  # Of a search on another host.
        return
    line = f"{os.getpid()} {why}\n".encode()
    descriptor = os.open(Path(folder) / _FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def starts(folder: str) -> tuple[str, ...]:
    """Why the script was started, each time, in order."""
    try:
        text = (Path(folder) / _FILE).read_text()
    except FileNotFoundError:
        return ()
    return tuple(line.partition(" ")[2] for line in text.splitlines())
