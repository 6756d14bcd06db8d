"""What is installed, and whose a file is: automesh's own, installed, or the user's."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
INSTALLED = ("site-packages", "dist-packages")
"""Folders for what is installed, wherever they are."""
_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
LIBRARIES = tuple(sorted({*_FOLDERS, *(str(Path(folder).resolve()) for folder in _FOLDERS)}))
"""Folders of the standard library and of what is installed beside it."""


_COUNTED: list[str] = []


def count_as_users(folder: str) -> None:
    """An installed package whose program is searched is the user's own code here."""
    _COUNTED.append(f"{folder.rstrip('/')}/")


def is_users_file(file: str) -> bool:
    """Whether a file is the user's own code: not installed, none of ours, no text that was run.

    Args:
      file: as frames and tracebacks name it.
    """
    if file.startswith(tuple(_COUNTED)):
        return True
    if any(folder in file for folder in INSTALLED):
        return False
    return not file.startswith(("<", str(PACKAGE), *LIBRARIES))


def installed_version(package: str) -> str:
    """The version of an installed package, which is not imported; empty if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
