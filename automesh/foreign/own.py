"""A SQLite database of this account's own: what must hold of it before it is opened where it lies.

To open it is to obey what lies beside it and in it (see `automesh.foreign.sqlite`). So the file,
its log and its shared memory are regular files of this account, there is no rollback journal, which
no database of ours ever has, and its schema is looked at before any other statement. Which folders
are safe is `automesh.foreign.ownership`'s; which schema is right, the caller's.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

from automesh import limits
from automesh.foreign.ownership import is_only_open, why_file_is_foreign
from automesh.foreign.sqlite import Bounded, harden, journal_of, log_of


class Made(NamedTuple):
    """One row of a database's schema; `sql` is None for what SQLite makes by itself."""

    kind: str
    name: str
    table: str
    sql: str | None


def shared_memory_of(path: Path) -> Path:
    """The shared memory of those who have a database open."""
    return path.with_name(f"{path.name}-shm")


def files_of(path: Path) -> tuple[Path, Path, Path]:
    """A database, its write-ahead log and its shared memory."""
    return path, log_of(path), shared_memory_of(path)


def why_foreign(path: Path) -> str:
    """Why a database, or what SQLite reads with it, may hold what another account has written, in
    words; empty if it cannot, or if there is none. Nothing is said of its folder.

    Raises:
      OSError: it cannot be looked at.
    """
    found = (why_file_is_foreign(one) for one in files_of(path))
    return next((one for one in found if one), "")


def why_of_others(path: Path) -> str:
    """As `why_file_is_foreign`, for a file in which what others may have changed counts for less:
    empty also if it is this account's and others may only write into it.

    Raises:
      OSError: it cannot be looked at.
    """
    reason = why_file_is_foreign(path)
    return "" if not reason or is_only_open(path) else reason


def has_journal(path: Path) -> bool:
    """Whether a rollback journal lies beside a database: SQLite would play it back, and delete the
    file that it names as its super-journal. A database of ours has a log instead."""
    return os.path.lexists(journal_of(path))


def look(path: Path, *, wait_s: float) -> Bounded:
    """Opens one's own database for reading, with its log, where no statement can run long.

    Args:
      wait_s: for the lock of another process.

    Raises:
      sqlite3.Error: it is no database.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro"
    connection = sqlite3.connect(uri, uri=True, timeout=wait_s, factory=Bounded)
    try:
        harden(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def schema_of(connection: sqlite3.Connection) -> list[Made]:
    """All that a database has, one more than `limits.FOREIGN_TABLES` at the most: whoever opens one
    compares this before any other statement, as others may run what stands in it.

    Raises:
      sqlite3.Error: the file is damaged.
    """
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT ?"
    return [Made(*row) for row in connection.execute(query, (limits.FOREIGN_TABLES + 1,))]
