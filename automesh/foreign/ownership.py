"""Recognizes folders and files that only this account can have written.

An account that may write into a folder, or into one above it, can replace a file that was checked a
moment before by another file, a journal of SQLite or a link. So a file is safe only if its folder
and all folders above it are. Root is trusted, and so is a folder such as `/tmp`, in which only the
owner of an entry can rename it.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")


def why_others_may_write(folder: Path) -> str:
    """Says why another account may put files into a folder; empty if none may.

    Checks the folder, all folders above it, and the targets of links among them: an account that
    may write into one of these may replace this folder by another one.
    """
    real = Path(os.path.realpath(folder))
    try:
        for place in dict.fromkeys([folder, *folder.parents, real, *real.parents]):
            reason = _why_exposed(place, is_last=place in (folder, real))
            if reason:
                return reason
    except OSError as error:
        return f"`{error.filename}` cannot be looked at: {(error.strerror or '').lower()}"
    return ""


def why_others_may_replace(folder: Path) -> str:
    """Says why another account may replace this account's entries in a folder; empty if none may.

    Unlike in `why_others_may_write`, others may make their own entries in a folder like `/tmp`, and
    a folder of an owner without a number here, in a container or a sandbox, counts as the system's.
    Raises:
      OSError: the status of the folder, or of one above it, cannot be read.
    """
    real = Path(os.path.realpath(folder))
    trusted = frozenset({os.geteuid(), 0, *_unmapped_account()})
    for place in dict.fromkeys([folder, *folder.parents, real, *real.parents]):
        status = place.stat()
        if status.st_uid not in trusted:
            return f"`{place}` belongs to another account"
        if not status.st_mode & stat.S_ISVTX and _is_open(status):
            return f"other accounts may write into `{place}`"
    return ""


def _unmapped_account() -> frozenset[int]:
    """Returns the number of all accounts that have none in this Linux user namespace; else none."""
    try:
        every = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
        return frozenset() if every else frozenset({int(_OVERFLOW.read_text())})
    except (OSError, ValueError):
        return frozenset()


def why_file_is_foreign(path: Path) -> str:
    """Says why another account may have written a file; empty if none can have, or without a file.

    This does not check its folder, see `why_others_may_write`.

    Raises:
      OSError: its status cannot be read.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return ""
    if stat.S_ISLNK(status.st_mode):
        return f"`{path}` is a link"
    if not stat.S_ISREG(status.st_mode):
        return f"`{path}` is no regular file"
    if status.st_uid != os.geteuid():
        return f"`{path}` belongs to another account"
    return f"other accounts may write into `{path}`" if _is_open(status) else ""


def is_only_open(path: Path) -> bool:
    """Whether a file is a regular one of this account.

    If it is foreign nevertheless, others may only change its content.

    Raises:
      OSError: its status cannot be read.
    """
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _why_exposed(place: Path, *, is_last: bool) -> str:
    status, me = place.stat(), os.geteuid()
    if status.st_uid != me and (is_last or status.st_uid != 0):
        return f"`{place}` belongs to another account"
    # In a folder like /tmp others can neither remove nor rename entries of other owners.
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and not is_last
    if not is_sticky and _is_open(status):
        return f"other accounts may write into `{place}`"
    return ""


def _is_open(status: os.stat_result) -> bool:
    """Whether accounts other than the owner of a file or folder may write into it."""
    if not status.st_mode & _BY_OTHERS:
        return False
    return bool(status.st_mode & stat.S_IWOTH) or not _is_group_of_one(status.st_gid)


def _is_group_of_one(group: int) -> bool:
    """Whether a group is the one that a system makes for each account, with the same name."""
    try:
        me, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return me.pw_gid == group and entry.gr_name == me.pw_name and not {*entry.gr_mem} - {me.pw_name}
