"""Writes files whole or not at all, and never through a link that somebody else has made.

The content is first written to a draft: a new file in the same folder, under a name that nobody can
predict. When the draft is on the disk, one rename puts it in the place of the old file. If anything
fails before, the old file stays whole, and the draft is removed. The draft of a killed process is
removed by the next process that writes into the folder.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import time
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from automesh.limits import ABANDONED_DRAFT_S, EDIT_SETTLES_S
from automesh.reading import Unreadable, read_bytes

_NAMED = 40  # characters of a file's name in that of its draft: a name has at most 255 bytes
_END = re.compile(r"[0-9a-f]{16}\.draft")
_DRAFT = re.compile(r"\..*\." + _END.pattern, re.DOTALL)
_AT_FDCWD = -100  # linux/fcntl.h
_RENAME_EXCHANGE = 2  # linux/fs.h
# The kernel or the file system cannot exchange two files in one step.
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def write_whole(
    path: Path, content: str | bytes, *, lasting: bool = True, alone: bool = False
) -> None:
    """Makes a file, or replaces it in one step: a reader sees the old one or the new, never a part.

    A file that is there keeps its permissions and, where that is allowed, its group; a new one gets
    what the umask leaves. A link is replaced; its target stays as it is.

    Args:
      content: text is written as UTF-8, line ends as they are.
      lasting: the file is on the disk when this returns, so that it also survives a power cut.
      alone: the caller holds the lock that every writer of this file takes, so that all other
        drafts of it are left over and are removed.

    Raises:
      OSError: it cannot be written, or `path` is no regular file; names `path`. The old file is
        unchanged, and no draft is left.
    """
    with _errors_name_file(path):
        draft = _write_draft(path, _as_bytes(content), lasting=lasting, alone=alone)
        try:
            draft.replace(path)
        except BaseException:
            _remove(draft)
            raise
        if lasting:
            _sync_folder(path.parent)


def move_whole(draft: Path, path: Path) -> None:
    """Flushes a file to the disk and renames it to `path`, in the same file system.

    Raises:
      OSError: it cannot; names `path`.
    """
    with _errors_name_file(path):
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
        _sync_folder(path.parent)


def write_new(path: Path, content: str | bytes) -> bool:
    """Makes a file unless there is one; the caller holds its lock. Otherwise does what
    `write_whole` does.

    Returns:
      Whether it was made: False if there is one already.

    Raises:
      OSError: as `write_whole`.
    """
    with _errors_name_file(path):
        draft = _write_draft(path, _as_bytes(content), lasting=True, alone=True)
        try:
            # Unlike a rename, a second name (hard link) for the draft replaces nothing.
            path.hardlink_to(draft)
        except FileExistsError:
            return False
        except OSError:  # Some file systems have no hard links.
            if os.path.lexists(path):
                return False
            draft.replace(path)
        finally:
            _remove(draft)
        _sync_folder(path.parent)
        return True


def replace_unchanged(path: Path, content: str | bytes, *, expected: str | bytes) -> bool:
    """Replaces a file in one step, but only one that still holds `expected`.

    What an editor writes at the same moment is kept, too: where the system can exchange two files
    in one step (Linux), the old file is compared after it was replaced, and put back if it does not
    hold `expected`. Elsewhere it is compared just before. The caller holds the lock of the file, as
    with `alone` of `write_whole`.

    Returns:
      Whether it was replaced.

    Raises:
      OSError: as `write_whole`; or the file does not exist any more.
    """
    ours, theirs = _as_bytes(content), _as_bytes(expected)
    with _errors_name_file(path):
        draft = _write_draft(path, ours, lasting=True, alone=True)
        try:
            if not _exchange(draft, path):
                path.lstat()  # An exchange also fails if the file does not exist.
                if not _holds(path, theirs):
                    return False
                draft.replace(path)
            elif not _still_holds(draft, theirs):
                _restore(draft, path, ours)
                return False
        finally:
            _remove(draft)
        _sync_folder(path.parent)
        return True


def lock_beside(path: Path, *, timeout_s: float) -> FileLock:
    """Returns the lock that every process takes before it changes a file in several steps.

    The kernel releases it when its holder is killed. It is a file of its own, which stays.

    Args:
      timeout_s: how long to wait for another holder; `filelock.Timeout` is raised after it.
    """
    return FileLock(str(path.with_name(f".{path.name}.lock")), timeout=timeout_s)


def check_place(path: Path) -> None:
    """Checks that a file can be written and locked.

    Writes a draft of it and removes it at once, and takes the lock if it exists and is free.

    Raises:
      OSError: names the file, or its lock.
    """
    with _errors_name_file(path):
        _remove(_write_draft(path, b"", lasting=False, alone=False))
    lock = lock_beside(path, timeout_s=0)
    if os.path.lexists(lock.lock_file):  # Otherwise the draft has shown that it can be made.
        with _errors_name_file(Path(lock.lock_file)), suppress(Timeout), lock:
            pass


def is_foreign_link(path: Path) -> bool:
    """Whether an untrusted account has made a link: neither ours, nor root, nor the folder's owner.

    Raises:
      OSError: the folder cannot be read.
    """
    if not path.is_symlink():
        return False
    return path.lstat().st_uid not in (os.geteuid(), 0, path.parent.stat().st_uid)


def open_log(path: Path) -> BinaryIO:
    """Opens a file for appending, and creates it if it does not exist.

    Raises:
      OSError: it cannot be opened; or it is a link or no regular file, which somebody else may have
        made.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _errors_name_file(path):
        descriptor = os.open(path, flags, 0o666)
        file = os.fdopen(descriptor, "r+b", buffering=0)
        try:
            _check_kind(os.fstat(descriptor).st_mode)
        except BaseException:
            file.close()
            raise
        return file


def drafts_in(folder: Path) -> Iterator[Path]:
    """Lists all drafts in a folder, including those that are being written."""
    with suppress(FileNotFoundError):
        yield from (path for path in folder.iterdir() if _DRAFT.fullmatch(path.name))


@contextmanager
def _errors_name_file(path: Path) -> Generator[None]:
    """Puts the name of the file into errors of the system.

    A failed write names no file, and the name of a draft means nothing to the user.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror or os.strerror(error.errno), str(path)) from error


def _as_bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _write_draft(path: Path, content: bytes, *, lasting: bool, alone: bool) -> Path:
    """Writes a draft of a file, with the permissions that the file will have."""
    there = _status(path)
    if alone:
        _remove_drafts_of(path)
    _collect_drafts(path.parent.absolute())
    draft = path.with_name(f"{_draft_prefix(path)}{os.urandom(8).hex()}.draft")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # The system takes the umask off: this process need not know it.
    descriptor = os.open(draft, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if there is not None:
                _copy_permissions(descriptor, there)
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(descriptor)
    except BaseException:
        _remove(draft)
        raise
    return draft


def _draft_prefix(path: Path) -> str:
    """Returns the prefix of the names of all drafts of a file."""
    if len(path.name) <= _NAMED:
        return f".{path.name}."
    return f".{path.name[:_NAMED]}-{zlib.crc32(os.fsencode(path.name)):08x}."


def _status(path: Path) -> os.stat_result | None:
    """Returns the status of a file; None for a link, which is replaced, and if there is none.

    Raises:
      OSError: the path, or the target of a link, is no regular file: neither a folder nor
        `/dev/null` is replaced.
    """
    try:
        # Looks at a file once: another process may remove it at any instant.
        there = path.lstat()
        is_link = stat.S_ISLNK(there.st_mode)
        _check_kind(path.stat().st_mode if is_link else there.st_mode)
    except FileNotFoundError:  # It does not exist, or is a link to nothing.
        return None
    return None if is_link else there


def _check_kind(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _copy_permissions(descriptor: int, there: os.stat_result) -> None:
    if os.fstat(descriptor).st_gid != there.st_gid:
        with suppress(OSError):  # The system allows this only for groups that the user is in.
            os.fchown(descriptor, -1, there.st_gid)
    os.fchmod(descriptor, there.st_mode & 0o777)


def _sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk, as far as the system can."""
    # The file has its name. Some systems cannot flush a folder, which is no failure.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(draft: Path) -> None:
    # The error that is being raised matters more than a draft that cannot be removed.
    with suppress(OSError):
        draft.unlink()


def _remove_drafts_of(path: Path) -> None:
    beginning = _draft_prefix(path)
    for draft in drafts_in(path.parent):
        if draft.name.startswith(beginning) and _END.fullmatch(draft.name[len(beginning) :]):
            _remove(draft)


@cache
def _collect_drafts(folder: Path) -> None:
    """Removes drafts that killed processes have left; once per process, as folders may be large."""
    with suppress(OSError):
        for draft in drafts_in(folder):
            with suppress(OSError):
                if time.time() - draft.lstat().st_mtime > ABANDONED_DRAFT_S:
                    draft.unlink()


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two files in one step; returns False where that is not possible."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _still_holds(path: Path, expected: bytes) -> bool:
    """Whether a file still holds `expected` after the time that a writing editor needs."""
    if not _holds(path, expected):
        return False
    time.sleep(EDIT_SETTLES_S)
    return _holds(path, expected)


def _restore(draft: Path, path: Path, ours: bytes) -> None:
    """Restores the file that was replaced, unless somebody has written a newer one since then."""
    _exchange(draft, path)
    if not _holds(draft, ours):
        _exchange(draft, path)


def _holds(path: Path, expected: bytes) -> bool:
    """Whether the file holds exactly these bytes; False if it is gone or no file any more."""
    try:
        return read_bytes(path, limit_bytes=len(expected)) == expected
    except Unreadable:
        return False
