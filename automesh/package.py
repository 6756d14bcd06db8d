"""Tells whether a file is automesh's own, installed, or the user's, and what is installed."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
INSTALLED = ("site-packages", "dist-packages")
"""Names of the folders that hold installed packages, wherever they are."""
_FOLDERS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
LIBRARIES = tuple(sorted({*_FOLDERS, *(str(Path(folder).resolve()) for folder in _FOLDERS)}))
"""Folders of the standard library and of the packages that are installed with it."""

TEMPORARY_MARK = ".automesh-temporary"
"""Name of a file in each folder that automesh makes for the time of a process."""
KEPT_APART = "automesh-run-"
"""Beginning of the name of the private folder that keeps what a script writes."""
_COUNTED: list[str] = []
_OURS: dict[str, str] = {"automesh": str(PACKAGE)}
_ASK_AS_USERS: set[str] = set()


def count_as_ours(name: str, file: str, *, asks_as_user: bool = False) -> None:
    """Makes a plug-in's code count as automesh's own, as its `__init__.py` asks for.

    Args:
      name: of its package.
      file: the `__init__.py` of this package.
      asks_as_user: whether its code reads the same attributes of devices as user code does, since
        it replaces the user's own program.
    """
    _OURS[name] = str(Path(file).resolve().parent)
    if asks_as_user:
        _ASK_AS_USERS.add(name)


def is_our_module(name: str) -> bool:
    """Whether a module is automesh's own, or a plug-in's that says so.

    >>> is_our_module("automesh.mesh.axes"), is_our_module("automesh_of_mine.train")
    (True, False)
    """
    return name.partition(".")[0] in _OURS


def asks_as_user(name: str) -> bool:
    """Whether a module of ours reads the attributes of devices that user code reads."""
    return name.partition(".")[0] in _ASK_AS_USERS


def our_folders() -> tuple[str, ...]:
    """Returns the folders of automesh's own code."""
    return tuple(_OURS.values())


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
    if file.startswith(("<", *_OURS.values(), *LIBRARIES)):
        return False
    return not _is_in_installed_package(file, tuple(sys.path))


@functools.lru_cache(maxsize=4096)
def _is_in_installed_package(file: str, import_path: tuple[str, ...]) -> bool:
    """Whether a file belongs to a package that `pip install --target` has put into a folder of the
    import path. The script itself may be in the same folder."""
    for folder in import_path:
        if folder and file.startswith(f"{folder.rstrip('/')}/"):
            name = file[len(folder.rstrip("/")) + 1 :].partition("/")[0]
            if name in _installed_names(folder):
                return True
    return False


@functools.lru_cache(maxsize=256)
def _installed_names(folder: str) -> frozenset[str]:
    """Names of the files and folders that packages installed in a folder have there.

    What is only built there, as a project of the user is, has `*.egg-info` and no such record.
    """
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for record in Path(folder).glob("*.dist-info/RECORD"):
            lines = record.read_text(errors="replace").splitlines()
            found.update(line.strip('"').partition("/")[0].partition(",")[0] for line in lines)
    return frozenset(found)


def installed_version(package: str) -> str:
    """Returns the version of a package, without importing it; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
