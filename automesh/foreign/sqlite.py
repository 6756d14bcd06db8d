"""A SQLite database that others may have written: copied, and only the copy is opened.

Opening a database runs what is in it and in files next to it. A journal next to it is played back
into it, and the file that the journal names as its super-journal is deleted, whatever it is;
CHECKs, views, triggers and expressions in its schema are run by statements that only seem to read.
So it is never opened in its own folder:

* `copied` copies the file into a private folder, without its journal and shared memory, up to a
limit, and again if it changed meanwhile. The write-ahead log may be copied, too: it contains pages
with checksums and names no file; * `connect` opens the copy read-only and immutable, so that SQLite
reads no other file, with the switches that keep a schema from calling functions, and with a limit
in seconds for all statements together. Ctrl-C ends a statement; * the caller must compare the
schema with the expected one before any other statement.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from automesh import limits
from automesh.errors import UsageError
from automesh.reading import Unreadable, open_regular
from automesh.units import format_bytes

_T = TypeVar("_T")

HEADER = b"SQLite format 3\x00"
HEADER_BYTES = 100
"""Size of the header before the first page's content: https://sqlite.org/fileformat2.html."""
_VERSIONS = slice(18, 20)  # of the format for who writes and who reads: 2 is a write-ahead log
_LOG_HEADER_BYTES = 32  # has numbers (salts) that change whenever the log begins anew
_TICK = 20_000  # instructions of SQLite's machine between two looks at the clock: under 1 ms
_ATTEMPTS = 20
_PAUSE_S = 0.05


class StatementsTooSlow(sqlite3.OperationalError):
    """The statements on a foreign database have taken longer than allowed."""


def is_busy(error: BaseException) -> bool:
    """Whether SQLite has given up waiting for another process."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # The primary code of an extended one.
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def log_of(path: Path) -> Path:
    """Returns the path of the write-ahead log of a database."""
    return path.with_name(f"{path.name}-wal")


def journal_of(path: Path) -> Path:
    """Returns the path of the rollback journal of a database; a study never has one."""
    return path.with_name(f"{path.name}-journal")


def is_wal(header: bytes) -> bool:
    """Whether the first 100 bytes of a database say that it has a write-ahead log."""
    return header[_VERSIONS] == b"\x02\x02"


def as_wal(data: bytes) -> bytes:
    """Marks a database's bytes as having a write-ahead log.

    A process that opens it for writing then needs no journal to change the mode.
    """
    return data[: _VERSIONS.start] + b"\x02\x02" + data[_VERSIONS.stop :]


# Copying the file


def copied(
    path: Path, folder: Path, *, limit_bytes: int, with_log: bool = False, follow: bool = True
) -> Path:
    """Copies a database in its state at one moment.

    Args:
      folder: a private folder; the copy gets the name of the file.
      limit_bytes: of the file, and of its log.
      with_log: copy also the changes that are only in the write-ahead log so far. Only for a file
        of this account; another account's log is not read.
      follow: links.

    Returns:
      The copy: a single file.

    Raises:
      Unreadable: it is no regular file, is larger than the limit, or changes all the time.
    """
    place = folder / path.name
    for _ in range(_ATTEMPTS):
        if _copied_once(path, place, limit_bytes=limit_bytes, with_log=with_log, follow=follow):
            if log_of(place).exists():
                _settle(place)
            return place
        time.sleep(_PAUSE_S)
    raise Unreadable(f"`{path}` cannot be read: it changes all the time")


def _copied_once(
    path: Path, place: Path, *, limit_bytes: int, with_log: bool, follow: bool
) -> bool:
    """Copies a database; False if it may have changed meanwhile in a way that matters.

    The file is copied first: unless the log starts again meanwhile, all pages that move from the
    log to the file are still in the log as well.
    """
    with open_regular(path, follow=follow) as file:
        before = os.fstat(file.fileno())
        with_log = with_log and before.st_uid == os.geteuid() and _is_own(log_of(path))
        log = _log_header(log_of(path)) if with_log else b""
        _copy(file.read, path, place, limit_bytes)
        copy = log_of(place)
        copy.unlink(missing_ok=True)
        if log:
            with open_regular(log_of(path), follow=False) as frames:
                if os.fstat(frames.fileno()).st_uid != os.geteuid():
                    raise Unreadable(f"`{log_of(path)}` belongs to another account")
                _copy(frames.read, log_of(path), copy, limit_bytes)
        after = os.fstat(file.fileno())
    now = path.stat() if follow else path.lstat()
    if (now.st_ino, now.st_dev) != (before.st_ino, before.st_dev):
        return False
    if with_log and _log_header(log_of(path)) != log:
        return False
    return bool(log) or (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


def _is_own(log: Path) -> bool:
    """Whether a log belongs to this account, or does not exist."""
    try:
        return log.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return True


def _log_header(path: Path) -> bytes:
    """Reads the header of a log; empty if there is no log, or an empty one."""
    if not os.path.lexists(path):
        return b""
    try:
        with open_regular(path, follow=False) as file:
            return file.read(_LOG_HEADER_BYTES)
    except Unreadable:
        if os.path.lexists(path):
            raise
        return b""  # The last process that had the database open has removed it.


def _copy(read: Callable[[int], bytes], source: Path, place: Path, limit_bytes: int) -> None:
    left = limit_bytes
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(place, flags, 0o600), "wb") as copy:
        while chunk := read(limits.CHUNK_BYTES):
            left -= len(chunk)
            if left < 0:
                raise Unreadable(
                    f"`{source}` cannot be read: it holds more than {format_bytes(limit_bytes)}"
                )
            copy.write(chunk)


def _settle(copy: Path) -> None:
    """Writes the log of a copy into the copy, without reading its schema."""
    try:
        with closing(sqlite3.connect(copy, factory=Bounded)) as connection:
            harden(connection)
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        for name in (log_of(copy), copy.with_name(f"{copy.name}-shm")):
            name.unlink(missing_ok=True)


# Connecting to the copy


class _Cursor(sqlite3.Cursor):
    """A cursor whose statements end at the time limit of their connection."""

    def _bounded(self, act: Callable[[], _T]) -> _T:
        if not isinstance(self.connection, Bounded):
            raise TypeError("only a bounded connection makes such a cursor")
        return self.connection.bounded(act)

    def execute(self, *arguments: Any) -> Any:
        return self._bounded(lambda: super(_Cursor, self).execute(*arguments))

    def executemany(self, *arguments: Any) -> Any:
        return self._bounded(lambda: super(_Cursor, self).executemany(*arguments))

    def fetchone(self) -> Any:
        return self._bounded(super().fetchone)

    def fetchmany(self, size: int | None = 1) -> list[Any]:
        return self._bounded(lambda: super(_Cursor, self).fetchmany(size))

    def fetchall(self) -> list[Any]:
        return self._bounded(super().fetchall)

    def __next__(self) -> Any:
        return self._bounded(super().__next__)


class Bounded(sqlite3.Connection):
    """A connection with a limit for all of its statements together, `limits.FOREIGN_SQL_S`.

    SQLite ignores signals while it works. Python handles Ctrl-C when the clock is read, and its
    driver turns that into a database error; this class raises KeyboardInterrupt again.
    """

    _left_s: float = limits.FOREIGN_SQL_S
    _begun_s: float | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.set_progress_handler(self._is_over, _TICK)

    def cursor(self, factory: Any = None) -> Any:
        return super().cursor(_Cursor if factory is None else factory)

    def execute(self, *arguments: Any) -> Any:
        # The driver's own shortcut makes a cursor without the limit.
        return self.cursor().execute(*arguments)

    def bounded(self, act: Callable[[], _T]) -> _T:
        """Runs a part of a statement.

        Raises:
          StatementsTooSlow: all statements together take too long.
          KeyboardInterrupt: Ctrl-C was pressed while SQLite worked.
        """
        if self._begun_s is not None:  # Nested calls.
            return act()
        self._begun_s = time.monotonic()
        try:
            return act()
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_READONLY:  # The reader tries to create a missing object.
                said = "it lacks what a search writes first, and it is only read here"
                raise sqlite3.OperationalError(said) from None
            if code != sqlite3.SQLITE_INTERRUPT:
                raise
            if not self._is_over():
                raise KeyboardInterrupt from None
            raise StatementsTooSlow(
                f"to read it takes longer than {limits.FOREIGN_SQL_S:.0f} s"
            ) from None
        finally:
            self._left_s -= time.monotonic() - self._begun_s
            self._begun_s = None

    def _is_over(self) -> bool:
        return self._begun_s is not None and time.monotonic() - self._begun_s > self._left_s


def harden(connection: sqlite3.Connection) -> None:
    """Keeps a database's schema from running code; call it before any other statement."""
    connection.execute("PRAGMA trusted_schema=OFF").close()
    connection.execute("PRAGMA cell_size_check=ON").close()
    connection.execute("PRAGMA mmap_size=0").close()
    # From Python 3.12 on; no statement here writes into a schema anyway.
    if set_config := getattr(connection, "setconfig", None):
        set_config(getattr(sqlite3, "SQLITE_DBCONFIG_DEFENSIVE"), True)  # noqa: B009
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, limits.FOREIGN_VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, limits.FOREIGN_SQL_BYTES)


def connect(copy: Path, *, text: Callable[[bytes], str] = bytes.decode) -> Bounded:
    """Opens a copy that `copied` has made: read-only, without reading other files.

    Args:
      text: decodes the bytes of a text.

    Raises:
      sqlite3.Error: it is no database.
    """
    connection = sqlite3.connect(
        f"{copy.absolute().as_uri()}?mode=ro&immutable=1",
        uri=True,
        check_same_thread=False,
        factory=Bounded,
    )
    try:
        connection.text_factory = text
        harden(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def check_header(path: Path, *, follow: bool = True) -> bytes:
    """Reads the first bytes of a database; empty if the file is empty.

    Raises:
      UsageError: it is no database.
    """
    with open_regular(path, follow=follow) as file:
        header = file.read(HEADER_BYTES)
    if header and not header.startswith(HEADER):
        raise UsageError(f"`{path}` is not a SQLite database")
    return header
