"""How often a script was started in a search: once is the rule, and more than three times is told.

Every process that starts it appends a line to a file in the folder of the stored step.
"""

from __future__ import annotations

import os
from pathlib import Path

from automesh.foreign.private import append_own, is_own_folder, read_own
from automesh.limits import SMALL_RECORD_BYTES

_FILE = "starts"


def note_start(folder: str, why: str) -> None:
    """Notes that the script is about to be started.

    Args:
      folder: of the stored step; empty: nobody counts.
      why: `first run`, `second run`, `winner`, or the mesh for which it is started.
    """
    # On another host than that of the search there is no such folder, or it is somebody else's.
    if folder and is_own_folder(Path(folder)):
        append_own(Path(folder) / _FILE, f"{os.getpid()} {why}\n".encode())


def starts(folder: str) -> tuple[str, ...]:
    """Why the script was started, each time, in order."""
    path = Path(folder) / _FILE
    if not path.exists():
        return ()
    text = read_own(path, limit_bytes=SMALL_RECORD_BYTES).decode()
    return tuple(line.partition(" ")[2] for line in text.splitlines())
