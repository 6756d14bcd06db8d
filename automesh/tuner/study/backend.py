"""Opens Optuna's storage, and turns whatever can go wrong with it into one sentence."""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
import tempfile
import time
import traceback
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

import optuna
import sqlalchemy as sa
import sqlalchemy.exc as sa_errors
from filelock import FileLock, Timeout
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages.journal import JournalFileOpenLock

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.foreign.sqlite import is_busy
from automesh.package import is_our_module
from automesh.reading import check_regular, open_regular
from automesh.skipped import DAMAGE, Skipped
from automesh.texts.storage_url import PASSWORD, PASSWORD_FILE, StorageUrl
from automesh.tuner.study.lease import LeaseTable
from automesh.tuner.study.lease_tables import FileLeases, SqlLeases
from automesh.tuner.study.storage import Storage
from automesh.tuner.study.stored.database import TolerantDatabase
from automesh.tuner.study.stored.journal import TolerantJournal, check_size, open_for_writing
from automesh.tuner.study.stored.sqlite import (
    KEEP,
    check_own,
    copy_of,
    is_read_in_place,
    own,
    refuse_writing,
    why_not_in_place,
)
from automesh.tuner.study.stored.working_copy import (
    WorkingCopy,
    open_working_copy,
    retire_working_copy,
)
from automesh.tuner.study.trials import RungName

CONNECT_S = 10
_RECORD = b'{"op_code":'
_DRIVERS = {
    "postgresql": "pip install 'jax-automesh[postgres]'",
    "mysql": "pip install pymysql, and write `mysql+pymysql://...`",
    "mariadb": "pip install pymysql, and write `mariadb+pymysql://...`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """An open storage: Optuna's studies, and automesh's leases.

    Attributes:
      skipped: records that were found damaged.
      copy: the folder of the private copy that is read; None for the storage itself.
      working: the folder where a study is searched whose own folder others may write into; else
        None.
      is_lent: whether the one that has lent it closes it.
    """

    optuna: BaseStorage
    leases: LeaseTable
    storage: Storage
    skipped: Skipped
    copy: tempfile.TemporaryDirectory[str] | None = None
    working: WorkingCopy | None = None
    is_lent: bool = False

    def lent(self) -> Backend | None:
        """Returns a storage on these connections for one study, which names what is damaged in it.

        None if each study of this storage has to be opened by itself.
        """
        if not isinstance(self.optuna, TolerantDatabase) or not isinstance(self.leases, SqlLeases):
            return None
        skipped = Skipped()
        return replace(
            self,
            optuna=self.optuna.noting(skipped),
            leases=self.leases.noting(skipped),
            skipped=skipped,
            is_lent=True,
        )

    def has_search(self, name: str) -> bool:
        """Whether one of Optuna's studies is of the search `name`."""
        if isinstance(self.optuna, TolerantDatabase):
            return self.optuna.has_one_of([f"{name}/{rung}" for rung in get_args(RungName)])
        return any(one.rpartition("/")[0] == name for one in self.study_names())

    def study_names(self) -> list[str]:
        """Lists the names of all of Optuna's studies in the storage."""
        if isinstance(self.optuna, TolerantDatabase):  # The notes of all studies are not read.
            return self.optuna.study_names()
        return [str(study.study_name) for study in self.optuna.get_all_studies()]

    def changes(self) -> dict[str, tuple[tuple[object, ...], float]]:
        """Returns for every search a value that differs after each change of its studies.

        The second value is the time of the last change, in seconds since 1970.
        """
        if isinstance(self.optuna, TolerantDatabase):
            by_study = self.optuna.changes()
        else:  # A journal is one file for all.
            status = Path(self.storage.location).stat()
            sign = (status.st_mtime_ns, status.st_size)
            by_study = dict.fromkeys(self.study_names(), (sign, status.st_mtime))
        found: dict[str, tuple[tuple[object, ...], float]] = {}
        for name, (signs, changed_s) in sorted(by_study.items()):
            search = name.rpartition("/")[0]
            before, before_s = found.get(search, ((), 0.0))
            found[search] = ((*before, name, *signs), max(before_s, changed_s))
        found.pop("", None)
        return found

    def publish(self, *, lasting: bool = False) -> None:
        """Writes SQLite's log into the database file, because others can read that file alone.

        It does not wait for readers.

        Args:
          lasting: whether this is the end of a search, so that the file must survive a power cut.

        Raises:
          UsageError: see `WorkingCopy.publish`.
        """
        if not isinstance(self.optuna, RDBStorage) or self.copy is not None:
            return
        if self.storage.kind != "sqlite":
            return
        engine = self.optuna.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            if self.working is None:
                connection.execute(sa.text("PRAGMA wal_checkpoint(PASSIVE)")).fetchall()
            elif isinstance(raw := connection.connection.dbapi_connection, sqlite3.Connection):
                self.working.publish(raw, self.storage.text, lasting=lasting)

    def explained(self) -> AbstractContextManager[None]:
        """Does what the function `explained` does, for this storage."""
        return explained(self.storage)

    def close(self) -> None:
        if self.is_lent:
            return
        self.leases.close()
        if isinstance(self.optuna, RDBStorage):
            self.optuna.remove_session()
            self.optuna.engine.dispose()
        if self.copy is not None:
            self.copy.cleanup()
        if self.working is not None:
            self.working.close()


def open_backend(storage: Storage, *, is_read_only: bool = False, in_place: bool = True) -> Backend:
    """Opens the storage, or makes it if there is none.

    Args:
      is_read_only: a file of SQLite that others may have written, or that may not be written, is
        read from a private copy, as it is now.
      in_place: False: a file of this account is read from a copy, too, because the reader may not
        trust what writes it.

    Raises:
      UsageError: it is not a study's storage, is damaged, may not be written, or cannot be reached.
    """
    with explained(storage):
        match storage.kind:
            case "sqlite" if is_read_only:
                return _read_sqlite(storage, in_place=in_place)
            case "sqlite":
                return _open_sqlite(storage)
            case "server":
                return _open_server(storage)
            case "journal":
                return _open_journal(storage)


@contextmanager
def explained(storage: Storage) -> Generator[None]:
    """Turns whatever a storage raises into a `UsageError` that names it."""
    # Log lines of Optuna about what we do with it would stand between ours.
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        raise _failure(storage, error.__cause__ or error) from _shown_cause(storage, error)
    except (sa_errors.SQLAlchemyError, sqlite3.Error, UnicodeError, OSError, Timeout) as error:
        raise _failure(storage, error) from _shown_cause(storage, error)
    except AutomeshError:
        raise
    except DAMAGE as error:
        # What a library makes of a damaged storage; errors of our own are not the storage's.
        if _is_raised_here(error):
            raise
        raise _failure(storage, error) from _shown_cause(storage, error)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _is_raised_here(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return is_our_module(str(frames[-1].f_globals.get("__name__", "")))


def _failure(storage: Storage, error: BaseException) -> UsageError:
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, Timeout) or is_busy(cause):
        return _in_use(storage, limits.LOCK_S)
    reason = _one_line(storage, cause) or type(cause).__name__
    return UsageError(
        f"the study's storage {storage.text} failed: {reason}",
        hint="what was finished is kept: mend it and run the same command again",
    )


def _one_line(storage: Storage, error: object) -> str:
    """Returns the message of a database without secrets."""
    return " ".join(storage.masked(str(error)).split())


def _shown_cause(storage: Storage, error: BaseException) -> BaseException | None:
    """Returns the cause that a traceback of the Python API may show: none that has a secret."""
    causes, one = list[BaseException](), error
    while one not in causes:
        causes.append(one)
        one = one.__cause__ or one.__context__ or one
    return error if all(storage.masked(str(each)) == str(each) for each in causes) else None


def _in_use(storage: Storage, waited_s: float) -> UsageError:
    return UsageError(
        f"another process has kept the study's storage {storage.text} locked for {waited_s:.0f} s",
        hint="end that process (`fuser FILE` names it), and run the same command again; what was "
        "finished is kept",
    )


def check_storage(storage: Storage) -> None:
    """Refuses, before a search has started any worker, a storage that cannot be opened.

    Raises:
      UsageError: as `open_backend`, but makes no study and waits for no lock for long.
    """
    with explained(storage):
        path = Path(storage.location)
        match storage.kind:
            case "sqlite":
                _check_writable(path, storage)
                refuse_writing(path)
                if why_not_in_place(path):
                    open_working_copy(path).close()
                else:
                    _check_sqlite(path, storage, limits.LOOK_S)
            case "server":
                _check_server(storage, *_server(storage))
            case "journal":
                _check_writable(path, storage)
                _check_journal(path, storage)


# SQLite


def _open_sqlite(storage: Storage) -> Backend:
    path = Path(storage.location)
    _check_writable(path, storage)
    refuse_writing(path)
    if why_not_in_place(path):
        return _open_working_copy(path, storage)
    # One process makes the tables, the others wait: Optuna does not expect two at once.
    with FileLock(f"{path}.flock", timeout=limits.LOCK_S, poll_interval=0.01):
        retire_working_copy(path, storage.text, os.environ)
        _check_sqlite(path, storage, limits.LOCK_S)
        return _open_rdb(storage, f"sqlite:///{path}", {"creator": own(path)})


def _open_working_copy(path: Path, storage: Storage) -> Backend:
    """Opens a study in a folder that others cannot write to."""
    working = open_working_copy(path)
    try:
        with working.lock():
            working.take(storage.text)
            options = {"creator": own(working.database)}
            return _open_rdb(storage, "sqlite://", options, working=working)
    except BaseException:
        working.close()
        raise


def _read_sqlite(storage: Storage, *, in_place: bool) -> Backend:
    """Opens a private copy of a file of others, or of any file unless `in_place`."""
    path = Path(storage.location)
    if in_place and is_read_in_place(path):
        return _open_sqlite(storage)
    check_regular(path)
    file = copy_of(path, storage.text)
    try:
        return _open_rdb(storage, "sqlite://", {"creator": file.connect}, copy=file.folder)
    except BaseException as error:
        file.folder.cleanup()
        cause = getattr(error.__cause__ or error, "orig", None) or error.__cause__ or error
        if getattr(cause, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_READONLY:
            raise
        # Optuna makes what is missing, and a copy is never written.
        raise UsageError(
            f"{storage.text} holds no whole study, and is only read here",
            hint="whose it is must run its search again, with the installed Optuna "
            f"{optuna.__version__} or a newer one",
        ) from None


def _check_writable(path: Path, storage: Storage) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder `{path.parent}` cannot be made: {error.strerror}",
            hint="name another folder with --results, or another --storage",
        ) from error
    write = os.R_OK | os.W_OK
    for place, what, access in ((path.parent, "folder", write | os.X_OK), (path, "file", write)):
        # The folder first: without its permission the file cannot even be asked about.
        if place.exists() and not os.access(place, access):
            raise UsageError(
                f"the {what} `{place}` may not be read and written",
                hint="change its permissions, or name another place with --results or --storage",
            )
    if path.is_dir():
        raise UsageError(f"{storage.text} is a folder, not a file", hint="name a file in it")
    check_regular(path)


def _check_sqlite(path: Path, storage: Storage, wait_s: float) -> None:
    try:
        check_own(path, storage.text, wait_s)
    except sqlite3.OperationalError as error:
        if not is_busy(error):
            raise
        raise _in_use(storage, wait_s) from error


# Database servers


def _open_server(storage: Storage) -> Backend:
    url, options = _server(storage)
    _check_server(storage, url, options)
    return _open_rdb(storage, _address(storage).bare, options)


def _server(storage: Storage) -> tuple[sa.URL, dict[str, Any]]:
    """Returns the URL of a server without its secrets, and how to connect to it."""
    address = _address(storage)
    url = sa.make_url(address.bare)
    # Beside the URL, which SQLAlchemy and Optuna keep and quote.
    arguments: dict[str, Any] = dict(address.secrets)
    if "connect_timeout" not in url.query:
        arguments["connect_timeout"] = CONNECT_S
    return url, {"connect_args": arguments, "pool_pre_ping": True}


def _address(storage: Storage) -> StorageUrl:
    if storage.server is None:
        raise TypeError("a storage on a server has the URL of the server")
    return storage.server


def _check_server(storage: Storage, url: sa.URL, options: dict[str, Any]) -> None:
    kind = url.get_backend_name()
    try:
        engine = sa.create_engine(url, **options)
    except (ImportError, sa_errors.NoSuchModuleError) as error:
        raise UsageError(
            f"the driver for {storage.text} is not installed: {_one_line(storage, error)}",
            hint=_DRIVERS[kind],
        ) from _shown_cause(storage, error)
    try:
        with engine.connect():
            pass
    except sa_errors.DBAPIError as error:
        raise UsageError(
            f"{storage.text} cannot be reached: {_one_line(storage, error.orig)}",
            hint="check that the server runs, the host, database and user in the URL, and the "
            f"password: in {PASSWORD}, {PASSWORD_FILE} or, for PostgreSQL, PGPASSFILE",
        ) from _shown_cause(storage, error)
    finally:
        engine.dispose()


def _open_rdb(
    storage: Storage,
    url: str,
    options: dict[str, Any],
    *,
    copy: tempfile.TemporaryDirectory[str] | None = None,
    working: WorkingCopy | None = None,
) -> Backend:
    attempts = 5
    for attempt in range(1, attempts + 1):
        try:
            rdb = _new_rdb(url, options)
            return Backend(
                optuna=rdb,
                leases=SqlLeases(rdb.engine, rdb.skipped, is_read_only=copy is not None),
                storage=storage,
                skipped=rdb.skipped,
                copy=copy,
                working=working,
            )
        except RuntimeError as error:
            raise _schema_mismatch(storage, error) from _shown_cause(storage, error)
        except (sa_errors.SQLAlchemyError, optuna.exceptions.StorageInternalError):
            # Two processes made the tables at the same moment: one of them failed.
            if attempt == attempts:
                raise
            time.sleep(0.2 * attempt)
    raise AssertionError("unreachable")


def _new_rdb(url: str, options: dict[str, Any]) -> TolerantDatabase:
    """Constructs a storage; if that raises, the connections that it opened are closed."""
    rdb = TolerantDatabase.__new__(TolerantDatabase)
    rdb.skipped = Skipped()
    try:
        # Optuna fills `{SCHEMA_VERSION}` into the URL: other braces must be doubled.
        rdb.__init__(url.replace("{", "{{").replace("}", "}}"), engine_kwargs=options)
    except BaseException:
        if hasattr(rdb, "engine"):
            rdb.engine.dispose()
        raise
    return rdb


def _schema_mismatch(storage: Storage, error: RuntimeError) -> UsageError:
    if "storage upgrade" in str(error):
        return UsageError(
            f"{storage.text} was made by an older Optuna than the installed {optuna.__version__}",
            hint=f"upgrade it: `optuna storage upgrade --storage {shlex.quote(storage.text)}`",
        )
    return UsageError(
        f"{storage.text} was made by a newer Optuna than the installed {optuna.__version__}",
        hint="install a newer one: `pip install -U optuna`",
    )


# Journal


class FlockedJournal(JournalFileOpenLock):
    """A lock for Optuna's journal file that the kernel releases at the death of its process.

    Optuna's own locks are files, which a killed process leaves behind for 30 s. The process may
    also leave half a line, which makes the journal unreadable once another line follows: the next
    holder of this lock cuts it off first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = FileLock(f"{path}.flock", timeout=limits.LOCK_S, poll_interval=0.002)

    def acquire(self) -> bool:
        self._lock.acquire()
        cut_torn_tail(self._path)
        return True

    def release(self) -> None:
        self._lock.release()


def cut_torn_tail(path: Path) -> None:
    """Cuts off a last line that has no line end; the caller holds the journal's lock."""
    with open_for_writing(path) as file:
        torn = len(_tail(file))
        file.seek(0)
        # Somebody may have put another file there since it was looked at.
        if torn and _is_record(file.readline(limits.JOURNAL_LINE_BYTES)):
            file.seek(-torn, os.SEEK_END)
            file.truncate()


def _tail(file: BinaryIO) -> bytes:
    """Returns the bytes after the last line end."""
    end = file.seek(0, os.SEEK_END)
    tail = b""
    while len(tail) < end and b"\n" not in tail:
        start = max(0, end - len(tail) - 4096)
        file.seek(start)
        tail = file.read(end - len(tail) - start) + tail
    return tail.rpartition(b"\n")[2]


def _open_journal(storage: Storage) -> Backend:
    path = Path(storage.location)
    _check_writable(path, storage)
    _check_journal(path, storage)
    skipped = Skipped()
    journal = TolerantJournal(path, FlockedJournal(path), skipped)
    leases = FileLeases(path.with_name(f"{path.name}.holds"), skipped)
    return Backend(optuna=journal, leases=leases, storage=storage, skipped=skipped)


def _check_journal(path: Path, storage: Storage) -> None:
    """Refuses a file that is no journal, whose last line would otherwise be cut off as torn."""
    if not path.exists():
        return
    with open_regular(path) as file:
        first = file.readline(limits.JOURNAL_LINE_BYTES)
    if first and not _is_record(first):
        raise UsageError(f"{storage.text} is not an Optuna journal", hint=KEEP)
    check_size(path)


def _is_record(line: bytes) -> bool:
    if line[: len(_RECORD)] == _RECORD[: len(line)]:
        return True
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and "op_code" in record
