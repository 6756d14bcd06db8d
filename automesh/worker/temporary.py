"""Temporary folders of a search, which it removes at its end, or the next search after a kill.

A folder holds a mark file, which its process keeps locked. The kernel releases the lock when the
process ends, for whatever reason. So a folder whose mark is not locked is left over.

Such folders hold code: pickled functions, native code and scripts for other programs. If other
accounts may rename files in $TMPDIR, which normally has the sticky bit, the folders are made in the
user's cache.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from automesh.errors import UsageError
from automesh.foreign.ownership import why_others_may_replace
from automesh.hlo.store import cache_root
from automesh.package import TEMPORARY_MARK

_MARK = TEMPORARY_MARK
_NAME = re.compile(r"automesh-[a-z]+-[a-z0-9_]{8}")  # as `mkdtemp` ends a name
_HINT = "make room there, or set TMPDIR to another folder"


@contextmanager
def temporary_folder(purpose: str) -> Generator[Path]:
    """Makes a folder that only this account can enter; removes it when the body ends.

    Args:
      purpose: a word for its name, in small letters.

    Raises:
      UsageError: it cannot be made.
    """
    folder, mark = _made(purpose)
    try:
        yield folder
    finally:
        _remove(folder, mark)


def folder_until_exit(purpose: str) -> Path:
    """Makes a folder as `temporary_folder` does; removes it when this process ends."""
    folder, mark = _made(purpose)
    process = os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # Not in a child that was forked from it.
            _remove(folder, mark)

    atexit.register(remove)
    return folder


def _made(purpose: str) -> tuple[Path, int]:
    """Makes a new folder; returns it with the descriptor of its mark."""
    try:
        parent = Path(tempfile.gettempdir())
        if reason := why_others_may_replace(parent):
            parent = _among_caches(reason)
        _collect(parent)
        folder = Path(tempfile.mkdtemp(prefix=f"automesh-{purpose}-", dir=parent))
    except OSError as error:
        raise _refused(error) from None
    try:
        return folder, _marked(folder)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise _refused(error) from None


def _among_caches(reason: str) -> Path:
    """Returns the folder in the user's cache that replaces $TMPDIR, which is unusable because of
    `reason`."""
    place = cache_root(os.environ) / "temporary"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := why_others_may_replace(place):
        raise UsageError(
            f"no temporary folder is safe from other accounts: {reason}, and {why}",
            hint="set TMPDIR to a folder where only you may write",
        )
    return place


def _refused(error: OSError) -> UsageError:
    name = f" `{error.filename}`" if isinstance(error.filename, str) else ""
    reason = (error.strerror or str(error)).lower()
    return UsageError(f"the temporary folder{name} cannot be made: {reason}", hint=_HINT)


# Errors of a file system without locks. A folder there has no mark, and is not found when left
# over.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


def _marked(folder: Path) -> int:
    # It gets its final name once it is locked, so that nobody takes the folder for left over
    # before.
    draft, flags = folder / f"{_MARK}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(draft, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        draft.rename(folder / _MARK)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path, mark: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(mark)


@cache
def _collect(parent: Path) -> None:
    """Removes the folders that processes of this account have left over; does so once per
    process."""
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_if_left(Path(entry.path))


def _remove_if_left(folder: Path) -> None:
    status = folder.lstat()
    is_ours = status.st_uid == os.geteuid() and status.st_mode & 0o777 == 0o700
    if not stat.S_ISDIR(status.st_mode) or not is_ours:
        return
    mark = os.open(folder / _MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Fails while its process lives.
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(mark)
