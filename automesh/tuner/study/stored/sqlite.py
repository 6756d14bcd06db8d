"""Opens the SQLite file of a study, in a way that depends on whose file it is.

A file of this account alone is opened where it is, with its write-ahead log, by any number of
processes of the account. It is such a file if nobody else can have written into it, its log, its
folder or a folder above, and if there is no rollback journal next to it: a study never has one, so
somebody else has put it there, and SQLite would play it back and delete the file that it names. All
of this still holds when the file is opened: nobody else can put a journal there in the meantime.

Any other file is read from a private copy (`automesh.foreign.sqlite`). It is only written if it
belongs to this account, and then in another place (`working_copy`).
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.files import write_whole
from automesh.foreign.own import has_journal, why_foreign, why_of_others
from automesh.foreign.ownership import why_others_may_write
from automesh.foreign.sqlite import (
    HEADER_BYTES,
    Bounded,
    StatementsTooSlow,
    as_wal,
    check_header,
    connect,
    copied,
    harden,
    is_busy,
    is_wal,
    journal_of,
)
from automesh.reading import read_bytes
from automesh.tuner.study.stored.schema import ForeignSchema, check_schema

KEEP = "it is never overwritten: move it away to start over, or name another --storage"
_ATTEMPTS = 3  # to read a database of others that is damaged
_PAUSE_S = 0.2
_ELSEWHERE = "or choose another folder with --results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A private copy of a database.

    Attributes:
      connect: opens a connection to it.
      folder: the folder of the copy, which is removed with it.
    """

    connect: Callable[[], sqlite3.Connection]
    folder: tempfile.TemporaryDirectory[str]


# Whose a database is


def refuse_writing(path: Path) -> None:
    """Refuses a study that no search may write.

    Raises:
      UsageError: it belongs to another account, is a link, or has a journal next to it; says what
        to do.
      OSError: it cannot be looked at.
    """
    reason = why_of_others(path)
    hint = f"copy the study to a folder of your own, {_ELSEWHERE}"
    if not reason:
        if not has_journal(path):
            return
        reason = (
            f"`{journal_of(path)}` lies beside it, which no study has: to play it back could "
            "delete any file"
        )
        hint = f"find out who has put it there, and remove it, {_ELSEWHERE}"
    raise UsageError(f"the study in `{path}` is not opened for writing: {reason}", hint=hint)


def why_not_in_place(path: Path) -> str:
    """Says why a study that this account may write is copied before it is opened; empty if not.

    Another account may put something there that SQLite would obey.

    Raises:
      OSError: it cannot be looked at.
    """
    return why_foreign(path) or why_others_may_write(path.parent)


# One's own


def check_own(path: Path, shown: str, wait_s: float) -> None:
    """Refuses a database that automesh did not create, before it is opened without a copy.

    Args:
      shown: the database, for messages.
      wait_s: for the lock of another process.

    Raises:
      UsageError: it is another program's, or is damaged.
      sqlite3.OperationalError: another process has kept it locked for so long.
    """
    if not path.exists() or not _header(path, shown):
        return
    with closing(sqlite3.connect(path, timeout=wait_s, factory=Bounded)) as connection:
        connection.text_factory = _text
        _check_content(connection, shown)


def own(path: Path) -> Callable[[], sqlite3.Connection]:
    """Returns a function that connects to a database of ours, which was checked.

    It makes the file if there is none. The caller has the lock.

    Raises:
      OSError, UsageError: it cannot be made or written.
    """
    _make_wal(path)

    def connect_own() -> sqlite3.Connection:
        refuse_writing(path)  # It costs microseconds, and a program of ours may have changed it.
        connection = sqlite3.connect(path, timeout=limits.LOCK_S, check_same_thread=False)
        try:
            harden(connection)
            # With the write-ahead log, NORMAL loses nothing when a process is killed and never
            # damages the file; a power cut may undo the last trials, which are then tried again.
            # FULL would wait for the disk some ten times per trial.
            connection.execute("PRAGMA synchronous=NORMAL").close()
            # Bytes that are not UTF-8 damage the one value that has them, not all read with it.
            connection.text_factory = _text
        except BaseException:
            connection.close()
            raise
        return connection

    return connect_own


def _make_wal(path: Path) -> None:
    """Makes a database with a write-ahead log, or gives an existing one such a log.

    Without it SQLite would need a rollback journal, which a killed process leaves behind.
    """
    if not path.exists() or not path.stat().st_size:
        with tempfile.TemporaryDirectory(prefix="automesh-study-") as folder:
            draft = Path(folder) / path.name
            with closing(sqlite3.connect(draft)) as connection:
                connection.execute("PRAGMA journal_mode=WAL").close()
                connection.execute("PRAGMA user_version=0").close()  # Writes the first page.
            data = draft.read_bytes()
        write_whole(path, data)
    elif not is_wal(_header(path, str(path))):
        write_whole(path, as_wal(read_bytes(path, limit_bytes=2**40)))


def _header(path: Path, shown: str) -> bytes:
    try:
        return check_header(path)
    except AutomeshError as error:
        if "is not a SQLite database" not in error.message:
            raise
        raise UsageError(f"{shown} is not a SQLite database", hint=KEEP) from None


def _check_content(connection: sqlite3.Connection, shown: str) -> None:
    """Checks the schema before the content: the check for damage runs what the schema says.

    Raises:
      UsageError: it is another program's, damaged, or takes too long.
      sqlite3.OperationalError: another process has it locked.
    """
    try:
        harden(connection)
        check_schema(connection)
        verdict = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    except ForeignSchema as error:
        raise UsageError(f"{shown} {error.message}", hint=KEEP) from None
    except StatementsTooSlow as error:
        raise UsageError(f"{shown} cannot be looked through: {error}", hint=KEEP) from None
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        if is_busy(error):
            raise
        verdict = str(error)
    if verdict != "ok":
        reason = " ".join(verdict.split())
        raise UsageError(f"the database {shown} is damaged: {reason}", hint=KEEP)


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


# Of others


def is_read_in_place(path: Path) -> bool:
    """Whether a database is our own, has a write-ahead log, and may be written.

    A search may be at work on it, and readers see it as it is at every moment.
    """
    try:
        if has_journal(path) or why_not_in_place(path):
            return False
        if not os.access(path.parent, os.W_OK):
            return False
        with path.open("rb") as file:
            return is_wal(file.read(HEADER_BYTES)) and os.access(path, os.W_OK)
    except OSError:
        return False


def copy_of(path: Path, shown: str) -> Copy:
    """Makes a private copy of a database, and checks it.

    Args:
      shown: the database, for messages.

    Raises:
      UsageError: it cannot be read, is larger than a study may be, another program's, or damaged.
    """
    folder = tempfile.TemporaryDirectory(prefix="automesh-study-")
    try:
        copy = _sound_copy(path, Path(folder.name), shown)
    except BaseException:
        folder.cleanup()
        raise
    return Copy(connect=lambda: connect(copy, text=_text), folder=folder)


def _sound_copy(path: Path, folder: Path, shown: str) -> Path:
    attempt = 1
    while True:
        copy = copied_to(path, folder, shown)
        try:
            check_copy(copy, shown)
            return copy
        except UsageError as error:
            # The search of another account may just be writing its log into the file.
            if "is damaged" not in error.message or attempt == _ATTEMPTS:
                raise
            attempt += 1
            time.sleep(_PAUSE_S)


def copied_to(path: Path, folder: Path, shown: str) -> Path:
    """Copies a database into a folder of ours; raises as `copy_of`.

    One of this account is copied with the changes in its log: a search may be at work on it.
    """
    _header(path, shown)
    return copied(path, folder, limit_bytes=limits.FOREIGN_DATABASE_BYTES, with_log=True)


def check_copy(copy: Path, shown: str) -> None:
    """Looks at the schema of a database in a folder of ours, and then for damage; raises as
    `copy_of`."""
    _header(copy, shown)
    with closing(connect(copy, text=_text)) as connection:
        _check_content(connection, shown)
