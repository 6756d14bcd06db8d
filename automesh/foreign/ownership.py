"""Which folders and files nobody but this account can have written into.

Whoever may write into a folder, or into one that it lies in, can put another file, a journal of
SQLite or a link in the place of what was looked at a moment before. So a file is one's own only if
this holds for its folder and for everything above it. Root is trusted, and so is a folder such as
`/tmp`, in which only the owner of an entry can rename it.
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
    """Why another account may put files into a folder, in words; empty if none may.

    Looks at the folder, at all that it lies in, and at where links among these lead: who may write
    into one of them may put another folder in the place of this one.
    """
    real = Path(os.path.realpath(folder))
    try:
        for place in dict.fromkeys([folder, *folder.parents, real, *real.parents]):
            reason = _exposed(place, is_last=place in (folder, real))
            if reason:
                return reason
    except OSError as error:
        return f"`{error.filename}` cannot be looked at: {(error.strerror or '').lower()}"
    return ""


def why_others_may_replace(folder: Path) -> str:
    """Why another account may move away what this one makes in a folder and make another entry of
    the same name, in words; empty if none may. Unlike `why_others_may_write`, others may make
    entries of their own in a folder like `/tmp`, and a folder of who has no number here, in a
    container or a sandbox, counts as the system's.

    Raises:
      OSError: the folder, or one that it lies in, cannot be looked at.
    """
    real = Path(os.path.realpath(folder))
    trusted = frozenset({os.geteuid(), 0, *_unmapped()})
    for place in dict.fromkeys([folder, *folder.parents, real, *real.parents]):
        status = place.stat()
        if status.st_uid not in trusted:
            return f"`{place}` belongs to another account"
        if not status.st_mode & stat.S_ISVTX and _is_open(status):
            return f"other accounts may write into `{place}`"
    return ""


def _unmapped() -> frozenset[int]:
    """The number that stands for all accounts that have none in this user namespace of Linux; none
    where all have one."""
    try:
        every = Path("/proc/self/uid_map").read_text().split() == ["0", "0", str(2**32 - 1)]
        return frozenset() if every else frozenset({int(_OVERFLOW.read_text())})
    except (OSError, ValueError):
        return frozenset()


def why_file_is_foreign(path: Path) -> str:
    """Why a file may hold what another account has written, in words; empty if it cannot, or if
    there is none. Nothing is said of its folder, see `why_others_may_write`.

    Raises:
      OSError: it cannot be looked at.
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
    """Whether a file is a regular one of this account: if it is foreign all the same, others may
    only change what is in it.

    Raises:
      OSError: it cannot be looked at.
    """
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _exposed(place: Path, *, is_last: bool) -> str:
    status, me = place.stat(), os.geteuid()
    if status.st_uid != me and (is_last or status.st_uid != 0):
        return f"`{place}` belongs to another account"
    # In a folder like /tmp others can neither remove nor rename what is not theirs.
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
