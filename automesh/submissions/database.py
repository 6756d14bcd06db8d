"""The tables of a service: tokens, bundles, submissions, answers that are repeated, the audit.

SQLite in the folder of the service. What a transaction has answered is on the disk: a server that
is killed at any moment has either done a change and remembers its answer, or has not.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
import sqlalchemy.exc as sa_errors

from automesh import limits
from automesh.errors import UsageError

_METADATA = sa.MetaData()

TOKENS = sa.Table(
    "tokens",
    _METADATA,
    sa.Column("number", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False),
    sa.Column("hash", sa.String, nullable=False),
    sa.Column("scope", sa.String, nullable=False),
    sa.Column("made_s", sa.Double, nullable=False),
    sa.Column("expires_s", sa.Double),
    sa.Column("revoked_s", sa.Double),
)
BUNDLES = sa.Table(
    "bundles",
    _METADATA,
    sa.Column("digest", sa.String, primary_key=True),
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("packed_bytes", sa.Integer, nullable=False),
    sa.Column("files", sa.String, nullable=False),
    sa.Column("made_s", sa.Double, nullable=False),
)
SUBMISSIONS = sa.Table(
    "submissions",
    _METADATA,
    sa.Column("number", sa.String, primary_key=True),
    sa.Column("owner", sa.String, nullable=False, index=True),
    sa.Column("digest", sa.String, nullable=False),
    sa.Column("order", sa.String, nullable=False),
    sa.Column("state", sa.String, nullable=False, index=True),
    sa.Column("said", sa.String, nullable=False),
    sa.Column("is_cancelled", sa.Boolean, nullable=False),
    sa.Column("runs", sa.Integer, nullable=False),
    sa.Column("made_s", sa.Double, nullable=False),
    sa.Column("changed_s", sa.Double, nullable=False),
)
ANSWERS = sa.Table(
    "answers",
    _METADATA,
    sa.Column("owner", sa.String, primary_key=True),
    sa.Column("key", sa.String, primary_key=True),
    sa.Column("request", sa.String, nullable=False),
    sa.Column("submission", sa.String, nullable=False),
    sa.Column("made_s", sa.Double, nullable=False),
)
RUNNERS = sa.Table(
    "runners",
    _METADATA,
    sa.Column("host", sa.String, primary_key=True),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_s", sa.Double, nullable=False),
    sa.Column("seen_s", sa.Double, nullable=False),
    sa.Column("cores", sa.Integer, nullable=False),
    sa.Column("memory_bytes", sa.BigInteger, nullable=False),
    sa.Column("running", sa.String, nullable=False),
    sa.Column("is_told_to_stop", sa.Boolean, nullable=False),
)
AUDIT = sa.Table(
    "audit",
    _METADATA,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("who", sa.String, nullable=False),
    sa.Column("address", sa.String, nullable=False),
    sa.Column("action", sa.String, nullable=False),
    sa.Column("subject", sa.String, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("said", sa.String, nullable=False),
)
_APPEND_ONLY = tuple(
    f"CREATE TRIGGER IF NOT EXISTS audit_{name} BEFORE {name} ON audit "
    "BEGIN SELECT RAISE(ABORT, 'the audit is only ever added to'); END"
    for name in ("UPDATE", "DELETE")
)


class Database:
    """The open database of a service; may be used by several threads and processes at once."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError if the file is none, or cannot be written."""
        self._path = path

        def connect() -> sqlite3.Connection:
            connection = sqlite3.connect(path, timeout=limits.LOCK_S, check_same_thread=False)
            # FULL: what was answered is on the disk. These are a few changes a minute.
            connection.execute("PRAGMA synchronous=FULL")
            return connection

        self._engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.QueuePool)
        # Python's driver begins a transaction only before a change: two processes could both read
        # and then both write. Ours take the lock before they read.
        writing = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._writing = writing
        try:
            with writing.connect() as connection:
                connection.execute(sa.text("PRAGMA journal_mode=WAL"))
            with self.change() as connection:
                _METADATA.create_all(connection, checkfirst=True)
                for statement in _APPEND_ONLY:
                    connection.execute(sa.text(statement))
        except sa_errors.SQLAlchemyError as error:
            self._engine.dispose()
            cause = getattr(error, "orig", None) or error
            raise UsageError(
                f"`{path}` cannot be used by the service: {cause}",
                hint="check the permissions, or choose another folder with --home",
            ) from None

    @contextmanager
    def change(self) -> Generator[sa.Connection]:
        """A transaction that nobody else's comes in between of; all of it is done, or nothing."""
        with self._writing.connect() as connection:
            connection.execute(sa.text("BEGIN IMMEDIATE"))
            try:
                yield connection
            except BaseException:
                connection.execute(sa.text("ROLLBACK"))
                raise
            connection.execute(sa.text("COMMIT"))

    @contextmanager
    def read(self) -> Generator[sa.Connection]:
        """A connection for single statements that change nothing."""
        with self._writing.connect() as connection:
            yield connection

    def close(self) -> None:
        self._engine.dispose()
