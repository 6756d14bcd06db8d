"""Counts how often a script was started in a search, and notes whether its stored step was lost.

Every process that starts the script appends a line to a file in the folder of the stored step.
"""

from __future__ import annotations

import os
from pathlib import Path

from automesh.foreign.private import append_own, is_own_folder, read_own
from automesh.limits import SMALL_RECORD_BYTES

_FILE, _LOST, _AGAIN = "starts", "lost", "again"


def note_start(folder: str, why: str) -> None:
    """Notes that the script is about to be started.

    Args:
      folder: folder of the stored step; empty to count nothing.
      why: `first run`, `second run`, `winner`, or the mesh for which it is started.
    """
    _append(folder, _FILE, why)


def note_lost(folder: str, why: str) -> None:
    """Notes that the stored step cannot be read.

    Args:
      why: the reason in words, without the name of the script.
    """
    _append(folder, _LOST, why)


def note_again(folder: str, why: str) -> None:
    """Notes why the script is run for a mesh although its step is carried to others.

    Args:
      why: the reason in words, without the name of the script.
    """
    _append(folder, _AGAIN, why)


def _append(folder: str, name: str, why: str) -> None:
    # On a host other than the search's this folder is missing or belongs to somebody else.
    if folder and is_own_folder(Path(folder)):
        append_own(Path(folder) / name, f"{os.getpid()} {why}\n".encode())


def starts(folder: str) -> tuple[str, ...]:
    """Lists the reason of each start of the script, in order."""
    return _lines(folder, _FILE)


def lost(folder: str) -> tuple[str, ...]:
    """Lists the reasons why the stored step could not be read, each once."""
    return tuple(dict.fromkeys(_lines(folder, _LOST)))


def again(folder: str) -> tuple[str, ...]:
    """Lists the reasons why the script was run although its step is carried, each once."""
    return tuple(dict.fromkeys(_lines(folder, _AGAIN)))


def _lines(folder: str, name: str) -> tuple[str, ...]:
    path = Path(folder) / name
    if not path.exists():
        return ()
    text = read_own(path, limit_bytes=SMALL_RECORD_BYTES).decode()
    return tuple(line.partition(" ")[2] for line in text.splitlines())
