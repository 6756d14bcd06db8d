"""Checks a SQLite database of this account before it is opened in its own folder.

Opening a database runs what is in it and in files next to it (see `automesh.foreign.sqlite`). So
the file, its log and its shared memory must be regular files of this account, there must be no
rollback journal, which no database of automesh ever has, and the schema is read before any other
statement. `automesh.foreign.ownership` checks the folders, and the caller the schema.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

from automesh import limits
from automesh.foreign.ownership import is_only_open, why_file_is_foreign
from automesh.foreign.sqlite import Bounded, harden, journal_of, log_of


class SchemaRow(NamedTuple):
    """One row of a database's schema; `sql` is None for objects that SQLite makes by itself."""

    kind: str
    name: str
    table: str
    sql: str | None


def shared_memory_of(path: Path) -> Path:
    """Returns the shared-memory file of the processes that have a database open."""
    return path.with_name(f"{path.name}-shm")


def files_of(path: Path) -> tuple[Path, Path, Path]:
    """Lists a database, its write-ahead log and its shared memory."""
    return path, log_of(path), shared_memory_of(path)


def why_foreign(path: Path) -> str:
    """Says why another account may have written a database, or files that SQLite reads with it.

    Empty if none can have, or if there is no database. This does not check its folder. Raises:
    OSError: its status cannot be read.
    """
    found = (why_file_is_foreign(one) for one in files_of(path))
    return next((one for one in found if one), "")


def why_of_others(path: Path) -> str:
    """Does what `why_file_is_foreign` does, for a file whose content matters less.

    Also empty if it belongs to this account and others may only write into it.

    Raises:
      OSError: its status cannot be read.
    """
    reason = why_file_is_foreign(path)
    return "" if not reason or is_only_open(path) else reason


def has_journal(path: Path) -> bool:
    """Whether a rollback journal is next to a database.

    SQLite would play it back, and delete the file that it names as its super-journal. Databases of
    automesh have a log instead.
    """
    return os.path.lexists(journal_of(path))


def look(path: Path, *, wait_s: float) -> Bounded:
    """Opens a database of this account for reading, with its log and a time limit for its
    statements.

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


def schema_of(connection: sqlite3.Connection) -> list[SchemaRow]:
    """Reads the schema of a database, at most `limits.FOREIGN_TABLES` and one more rows.

    A caller compares this before any other statement, as those may run code in the schema. Raises:
      sqlite3.Error: the file is damaged.
    """
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT ?"
    return [SchemaRow(*row) for row in connection.execute(query, (limits.FOREIGN_TABLES + 1,))]
