"""The folder where jax keeps executables for attached devices: native code, which workers run. Only
this account may write into it, since anyone who can put a file there can run code as this account.
So it is not a part of the results, which may be shared.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from automesh.foreign.ownership import why_others_may_write
from automesh.hlo.store import FOLDER_VARIABLE, cache_root
from automesh.limits import EXECUTABLES_BYTES, EXECUTABLES_IN_USE_S
from automesh.worker.temporary import temporary_folder

_FOLDER = "executables"


@contextmanager
def executables_folder(
    study: Path, environ: Mapping[str, str], notice: Callable[[str], object]
) -> Generator[Path]:
    """Makes the folder for a study's executables, in `$AUTOMESH_CACHE` or the user's cache.

    If others may write there, the folder is a temporary one, and `notice` gets the reason.

    Args:
      study: the study's folder; each study has executables of its own.
      notice: is called with a sentence that says why executables are not kept.

    Raises:
      UsageError: no temporary folder can be made.
    """
    root = cache_root(environ) / _FOLDER
    digest = hashlib.sha256(os.fsencode(study.absolute())).hexdigest()[:8]
    mine = root / f"{study.name}-{digest}"
    refused = _made(root) or why_others_may_write(root) or _made(mine)
    if refused:
        notice(
            f"executables are not kept in `{root}`: {refused} (make that folder private, or name "
            f"another one in {FOLDER_VARIABLE}; then the next search can use them again)"
        )
        with temporary_folder(_FOLDER) as folder:
            yield folder
        return
    with suppress(OSError):  # Another search will remove what cannot be removed now.
        os.utime(mine)
        _make_room(root)
    yield mine


def executables_here(name: str, environ: Mapping[str, str]) -> Path | None:
    """Returns the folder for a study's executables on a host other than the search's.

    Args:
      name: name of the folder on the search's host.

    Returns:
      The folder; None if others may write into it, so that nothing is kept.
    """
    root = cache_root(environ) / _FOLDER
    mine = root / Path(name).name
    refused = _made(root) or why_others_may_write(root) or _made(mine)
    return None if refused else mine


def _made(folder: Path) -> str:
    """Makes a folder for this account alone; returns why that fails, or an empty text."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StudyFolder:
    """The executables of a study: their size, and when its last search began."""

    folder: Path
    size_bytes: int
    used_s: float


def _make_room(root: Path) -> None:
    """Removes the least recently used folders until the rest is below the limit."""
    kept = sorted(map(_measured, _folders(root)), key=lambda one: one.used_s)
    newest_s = kept[-1].used_s if kept else 0.0  # The folder of this search, by the disk's clock.
    taken = sum(one.size_bytes for one in kept)
    for one in kept:
        if taken <= EXECUTABLES_BYTES or newest_s - one.used_s < EXECUTABLES_IN_USE_S:
            return
        shutil.rmtree(one.folder, ignore_errors=True)
        taken -= one.size_bytes


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]


def _measured(folder: Path) -> _StudyFolder:
    sizes: list[int] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # Another search of the same study may remove it.
                sizes.append(entry.stat(follow_symlinks=False).st_size)
    return _StudyFolder(folder=folder, size_bytes=sum(sizes), used_s=folder.stat().st_mtime)
