"""Reads and appends to files in a private folder of this account, which may be unpickled.

Processes pass the path of such a folder to others, also to another host. There, or if the folder
was moved, somebody else may have made one of the same name. So the folder is opened first, and all
checks and reads use the open folder, whatever its name means by then.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from automesh import limits
from automesh.reading import Unreadable

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def read_own(path: Path, *, limit_bytes: int) -> bytes:
    """Reads all bytes of a file that nobody else can have written.

    Raises:
      Unreadable: it does not exist, it or its folder is a link, belongs to another account or may
        be written by others, or it holds more than `limit_bytes`.
    """
    chunks: list[bytes] = []
    left = limit_bytes
    with _opened(path, os.O_RDONLY) as descriptor:
        while chunk := os.read(descriptor, limits.CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                raise Unreadable(f"`{path}` is larger than anything that was written there")
            chunks.append(chunk)
    return b"".join(chunks)


def append_own(path: Path, data: bytes) -> None:
    """Appends to a file in a folder in which nobody else can write; creates it if needed.

    Raises:
      Unreadable: as `read_own`.
    """
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
        os.write(descriptor, data)


def is_own_folder(folder: Path) -> bool:
    """Whether a folder exists, belongs to this account, and nobody else may write into it."""
    try:
        place = os.open(folder, _FOLDER)
    except OSError:
        return False
    try:
        return not _why_foreign(os.fstat(place))
    finally:
        os.close(place)


@contextmanager
def _opened(path: Path, flags: int) -> Generator[int]:
    try:
        place = os.open(path.parent, _FOLDER)
        try:
            _check(path.parent, os.fstat(place))
            descriptor = os.open(path.name, flags | _FILE, 0o600, dir_fd=place)
        finally:
            os.close(place)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable(f"`{path}` is no regular file")
            _check(path, status)
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise Unreadable(f"`{path}` cannot be opened: {reason}") from None


def _check(path: Path, status: os.stat_result) -> None:
    if reason := _why_foreign(status):
        raise Unreadable(f"`{path}` {reason}")


def _why_foreign(status: os.stat_result) -> str:
    if status.st_uid != os.geteuid():
        return "belongs to another account"
    return "may be written by other accounts" if status.st_mode & _BY_OTHERS else ""
