"""The tables of a service: tokens, bundles, submissions, leases, repeated answers, the audit.

The database is SQLite in the folder of the service. When a transaction returns, its changes are on
the disk: a server that is killed at any moment has either made a change and stored its answer, or
neither.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import sqlalchemy.exc as sa_errors

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.foreign.own import files_of, has_journal, look, schema_of, why_of_others
from automesh.foreign.sqlite import harden, journal_of

_METADATA = sa.MetaData()


def _columns(kind: Any, *names: str, **settings: Any) -> list[sa.Column[Any]]:
    """Makes columns of one kind. Each always has a value unless `settings` allow null."""
    settings = {"nullable": False, **settings}
    return [sa.Column(name, kind, **settings) for name in names]


TOKENS = sa.Table(
    "tokens",
    _METADATA,
    sa.Column("number", sa.String, primary_key=True),
    *_columns(sa.String, "name", "hash", "scope"),
    *_columns(sa.Double, "made_s"),
    *_columns(sa.Double, "expires_s", "revoked_s", nullable=True),
)
BUNDLES = sa.Table(
    "bundles",
    _METADATA,
    *_columns(sa.String, "digest", "owner", primary_key=True),
    *_columns(sa.Integer, "packed_bytes"),
    *_columns(sa.String, "files"),
    *_columns(sa.Double, "made_s"),
)
SUBMISSIONS = sa.Table(
    "submissions",
    _METADATA,
    sa.Column("number", sa.String, primary_key=True),
    *_columns(sa.String, "owner", "state", index=True),
    *_columns(sa.String, "digest", "order", "said"),
    *_columns(sa.Boolean, "is_cancelled"),
    *_columns(sa.Integer, "runs"),
    *_columns(sa.Double, "made_s", "changed_s"),
)
CUTS = sa.Table(  # how often runs of a submission were cut short since somebody queued it
    "cuts",
    _METADATA,
    sa.Column("number", sa.String, primary_key=True),
    *_columns(sa.Integer, "count"),
)
LEASES = sa.Table(  # which agent works on which submission
    "leases",
    _METADATA,
    sa.Column("number", sa.String, primary_key=True),
    sa.Column("lease", sa.String, nullable=False, unique=True),
    *_columns(sa.Integer, "run"),
    *_columns(sa.String, "holder", "agent", "place"),
)
STATES = sa.Table(  # the last state that an agent has sent for a submission
    "states",
    _METADATA,
    sa.Column("number", sa.String, primary_key=True),
    *_columns(sa.String, "lease", "place"),
    *_columns(sa.Integer, "run", "sequence"),
)
ANSWERS = sa.Table(
    "answers",
    _METADATA,
    *_columns(sa.String, "owner", "key", primary_key=True),
    *_columns(sa.String, "request", "submission"),
    *_columns(sa.Double, "made_s"),
)
RUNNERS = sa.Table(
    "runners",
    _METADATA,
    sa.Column("host", sa.String, primary_key=True),
    *_columns(sa.Integer, "pid", "cores"),
    *_columns(sa.Double, "started_s", "seen_s"),
    *_columns(sa.BigInteger, "memory_bytes"),
    *_columns(sa.String, "running"),
    *_columns(sa.Boolean, "is_told_to_stop"),
)
AUDIT = sa.Table(
    "audit",
    _METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    *_columns(sa.Double, "at_s"),
    *_columns(sa.String, "who", "address", "action", "subject", "said"),
    *_columns(sa.Integer, "status"),
)
ELAPSED = sa.Table(  # one row: how long the service has existed, see `submissions.elapsed`
    "elapsed",
    _METADATA,
    sa.Column("number", sa.Integer, primary_key=True),
    *_columns(sa.String, "boot"),
    *_columns(sa.Double, "steady_s", "day_s", "elapsed_s"),
)
SEEN = sa.Table(  # since when things that may be removed one day have not changed
    "seen",
    _METADATA,
    *_columns(sa.String, "kind", "name", primary_key=True),
    *_columns(sa.Double, "stamp", "at_s"),
)
_APPEND_ONLY = tuple(
    f"CREATE TRIGGER IF NOT EXISTS audit_{name} BEFORE {name} ON audit "
    "BEGIN SELECT RAISE(ABORT, 'the audit is only ever added to'); END"
    for name in ("UPDATE", "DELETE")
)


_NOT_WRITTEN = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
)


class Unwritable(AutomeshError):
    """The database cannot be written now: the disk is full or read-only, or another process holds
    the lock."""

    def __init__(self, reason: object) -> None:
        super().__init__(
            f"the service cannot write to its disk: {reason}",
            hint="send it again once there is room: what is done already is not done twice",
        )


class Database:
    """The open database of a service; may be used by several threads and processes at once."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError if the file is no database, or cannot be written."""
        check_ours(path)

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(path, timeout=limits.LOCK_S, check_same_thread=False)
            harden(connection)
            # FULL: a committed change is on the disk. There are only a few changes a minute.
            connection.execute("PRAGMA synchronous=FULL")
            return connection

        self._engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.QueuePool)
        # Python's driver begins a transaction only before a change: two processes could both read
        # and then both write. These transactions take the lock before they read.
        writing = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._writing = writing
        try:
            with writing.connect() as connection:
                connection.execute(sa.text("PRAGMA journal_mode=WAL"))
            with self.change() as connection:
                _create(connection)
        except (sa_errors.SQLAlchemyError, Unwritable) as error:
            self._engine.dispose()
            raise _unusable(path, getattr(error, "orig", None) or error) from None

    @contextmanager
    def change(self) -> Generator[sa.Connection]:
        """Runs a transaction that no other process can interrupt: all of it is done, or nothing.

        Raises:
          Unwritable: the disk is full.
        """
        try:
            with self._writing.connect() as connection:
                connection.execute(sa.text("BEGIN IMMEDIATE"))
                try:
                    yield connection
                    connection.execute(sa.text("COMMIT"))
                except BaseException:
                    # SQLite may have rolled back itself, as it does when the disk is full.
                    with suppress(sa_errors.OperationalError):
                        connection.execute(sa.text("ROLLBACK"))
                    raise
        except sa_errors.OperationalError as error:
            if (getattr(error.orig, "sqlite_errorcode", 0) & 0xFF) in _NOT_WRITTEN:
                raise Unwritable(error.orig) from None
            raise

    @contextmanager
    def read(self) -> Generator[sa.Connection]:
        """Opens a connection for single statements that change nothing."""
        with self._writing.connect() as connection:
            yield connection

    def close(self) -> None:
        self._engine.dispose()


def check_ours(path: Path) -> None:
    """Checks, without changing anything, that a file is a database that this version can use.

    Nothing in the file is executed: SQLite applies no journal that others wrote, and the tables
    must be those of this module or of a former version, which had fewer.

    Raises:
      UsageError: the file is something else, or belongs to another user.
    """
    try:
        # Other users cannot enter the folder, so the mode of the file does not matter.
        reason = next((one for one in map(why_of_others, files_of(path)) if one), "")
    except OSError as error:
        raise _unusable(path, error.strerror) from None
    if reason:
        raise _foreign(path, reason)
    if has_journal(path):
        raise _foreign(path, f"`{journal_of(path).name}` is there, which the service never writes")
    if not path.exists() or not path.stat().st_size:
        return
    try:
        with closing(look(path, wait_s=limits.LOCK_S)) as connection:
            kept = _schema_of(connection)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise _unusable(path, error) from None
    ours = _our_schema()
    odd = next((name for name, made in kept.items() if ours.get(name) != made), None)
    if odd is not None:
        raise _foreign(path, f"its `{odd}` is not of this version")


def _schema_of(connection: sqlite3.Connection) -> dict[str, str]:
    """Returns the statement that made each object in a database, by the object's name.

    Raises:
      sqlite3.Error: it cannot be read.
    """
    # SQLAlchemy's versions differ in whether they quote the name of a column `order`.
    made = {one.name: _normal(one.sql) for one in schema_of(connection) if one.sql is not None}
    made.pop("sqlite_sequence", None)
    return made


@cache
def _our_schema() -> dict[str, str]:
    """Returns the schema of this version's tables, as `_schema_of` does."""
    with closing(sqlite3.connect(":memory:")) as plain:
        engine = sa.create_engine("sqlite://", creator=lambda: plain, poolclass=sa.StaticPool)
        with engine.begin() as connection:
            _create(connection)
        return _schema_of(plain)


def _create(connection: sa.Connection) -> None:
    """Creates the tables that are missing."""
    _METADATA.create_all(connection, checkfirst=True)
    for statement in _APPEND_ONLY:
        connection.execute(sa.text(statement))


def _normal(sql: str) -> str:
    return " ".join(sql.replace('"', "").split()).replace("( ", "(").replace(" )", ")").lower()


def _unusable(path: Path, cause: object) -> UsageError:
    return UsageError(
        f"`{path}` cannot be used by the service: {cause}",
        hint="check the permissions, or choose another folder with --home",
    )


def _foreign(path: Path, what: str) -> UsageError:
    return UsageError(
        f"`{path}` was not made by this version of the service: {what}",
        hint="choose another folder with --home, or upgrade automesh if a newer version made it",
    )
