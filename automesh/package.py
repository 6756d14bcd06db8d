"""Tells whether a file is automesh's own, installed, or the user's, and what is installed."""

from __future__ import annotations

import importlib.metadata
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders that hold installed packages, wherever they are."""
_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
LIBRARIES = tuple(sorted({*_FOLDERS, *(str(Path(folder).resolve()) for folder in _FOLDERS)}))
"""Folders of the standard library and of the packages that are installed with it."""


_COUNTED: list[str] = []


def count_as_users(folder: str) -> None:
    """Treats an installed package as the user's own code, since its program is searched."""
    _COUNTED.append(f"{folder.rstrip('/')}/")


def is_users_file(file: str) -> bool:
    """Whether a file is the user's own code.

    Files of installed packages, of automesh, and code without a file (`<string>`) are not.

    Args:
      file: as frames and tracebacks name it.
    """
    if file.startswith(tuple(_COUNTED)):
        return True
    if any(folder in file for folder in INSTALLED):
        return False
    return not file.startswith(("<", str(PACKAGE), *LIBRARIES))


def installed_version(package: str) -> str:
    """Returns the version of a package, without importing it; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
