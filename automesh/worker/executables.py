"""Where jax keeps what it compiled for devices that are here: native code, which a worker will run.

So only a folder that nobody but this account can write into: whoever could put a file there would
run code as this account. Results may be shared; this folder is not among them.
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
    """The folder for the executables of a study: in `$AUTOMESH_CACHE`, else in the user's cache.

    Where others may write into that, it is a temporary one, and the user is told why.

    Args:
      study: the study's folder; another one has other executables.
      notice: told in a sentence why nothing is kept.

    Raises:
      UsageError: no temporary folder can be made.
    """
    root = cache_root(environ) / _FOLDER
    digest = hashlib.sha256(os.fsencode(study.absolute())).hexdigest()[:8]
    mine = root / f"{study.name}-{digest}"
    refused = _made(root) or why_others_may_write(root) or _made(mine)
    if refused:
        notice(
            f"executables are not kept in `{root}`: {refused} (make a folder private, or name "
            f"another one in {FOLDER_VARIABLE}, for the next search to start from them)"
        )
        with temporary_folder(_FOLDER) as folder:
            yield folder
        return
    with suppress(OSError):  # What cannot be removed now is removed by another search.
        os.utime(mine)
        _make_room(root)
    yield mine


def executables_here(name: str, environ: Mapping[str, str]) -> Path | None:
    """On another host than the search's: the folder for the executables of a study.

    Args:
      name: of the folder on the search's host.

    Returns:
      None where others may write into it: then nothing is kept.
    """
    root = cache_root(environ) / _FOLDER
    mine = root / Path(name).name
    refused = _made(root) or why_others_may_write(root) or _made(mine)
    return None if refused else mine


def _made(folder: Path) -> str:
    """Makes a folder for this account alone; why that fails, in words."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What a study has left: how much, and when its last search began."""

    folder: Path
    size_bytes: int
    used_s: float


def _make_room(root: Path) -> None:
    """Removes what was used least recently, until the rest is no larger than it may be."""
    kept = sorted(map(_kept, _folders(root)), key=lambda one: one.used_s)
    newest_s = kept[-1].used_s if kept else 0.0  # That of this search: the clock of the disk.
    taken = sum(one.size_bytes for one in kept)
    for one in kept:
        if taken <= EXECUTABLES_BYTES or newest_s - one.used_s < EXECUTABLES_IN_USE_S:
            return
        shutil.rmtree(one.folder, ignore_errors=True)
        taken -= one.size_bytes


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]


def _kept(folder: Path) -> _Kept:
    sizes: list[int] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # Another search of the same study repairs it.
                sizes.append(entry.stat(follow_symlinks=False).st_size)
    return _Kept(folder=folder, size_bytes=sum(sizes), used_s=folder.stat().st_mtime)
