"""The study of a results folder that other accounts may write into; it is searched in another
folder.

Whoever may write into the folder of a database, or into a folder above it, can put a journal next
to the database at the very moment at which SQLite opens it. So all processes of the account on this
host search such a study in a folder of the user's cache that nobody else can enter. They write the
study to the results folder as a whole file: at the first note, every few seconds and at the end. If
a search is killed, the cache has the rest, and the next search continues from there.

The folder remembers the hash of what was last written. If the results folder has another file,
another host or the user has put it there, and that file counts.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.files import write_whole
from automesh.foreign.own import files_of, shared_memory_of
from automesh.foreign.ownership import why_file_is_foreign, why_others_may_write
from automesh.foreign.sqlite import as_wal, log_of
from automesh.hlo.store import FOLDER_VARIABLE, cache_root
from automesh.jsonio import dumps, read_json
from automesh.reading import open_regular, read_bytes
from automesh.tuner.study.stored.sqlite import check_copy, copied_to

_FOLDER = "studies"
_NAME = "study.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingCopy:
    """The folder where the study of a results folder is searched.

    Attributes:
      published: its file in the results folder.
      folder: of ours alone.
      in_use: a descriptor whose lock says that a process works here.
    """

    published: Path
    folder: Path
    in_use: int

    @property
    def database(self) -> Path:
        return self.folder / _NAME

    @property
    def _mark(self) -> Path:
        return self.folder / "published.json"

    def lock(self) -> FileLock:
        return FileLock(str(self.folder / "lock"), timeout=limits.LOCK_S, poll_interval=0.01)

    def take(self, shown: str) -> None:
        """Copies the study from the results folder, unless this folder has written that one itself.

        The caller has the lock.

        Args:
          shown: the study, for messages.

        Raises:
          UsageError: it is no study, is damaged, or was changed while a search works here.
          OSError: it cannot be read or written.
        """
        digest = self._digest()
        if self.database.exists() and digest in self._marked():
            return
        if self.database.exists():
            if not self._is_alone():
                raise self._changed(shown)
            for path in files_of(self.database):
                path.unlink(missing_ok=True)
        if not digest:
            self._note("")
            return
        with tempfile.TemporaryDirectory(prefix="automesh-study-") as folder:
            copy = copied_to(self.published, Path(folder), shown)
            check_copy(copy, shown)
            content = as_wal(copy.read_bytes())
        write_whole(self.database, content)
        # What was in a log beside it is in the file now. A file that is replaced must have none.
        if os.path.lexists(log := log_of(self.published)) and not why_file_is_foreign(log):
            self._write(content, lasting=True)
            for path in (log, shared_memory_of(self.published)):
                with suppress(FileNotFoundError):
                    path.unlink()
        else:
            self._note(digest)

    def publish(self, connection: sqlite3.Connection, shown: str, *, lasting: bool = False) -> None:
        """Writes the study, as it is now, to the results folder.

        Args:
          connection: to the database. The file is read through it alone: a process that opens the
            file in another way and closes it loses SQLite's locks on it.
          lasting: on the disk when this returns.

        Raises:
          UsageError: another host, or somebody else, has changed it there.
          OSError: it cannot be written.
        """
        with tempfile.TemporaryDirectory(prefix="automesh-study-") as folder:
            copy = Path(folder) / _NAME
            with closing(sqlite3.connect(copy)) as target:
                connection.backup(target)
            content = as_wal(copy.read_bytes())
        with self.lock():
            marked, there = self._marked(), self._digest()
            if there and there not in marked:
                raise self._changed(shown)
            if there != hashlib.sha256(content).hexdigest():
                self._write(content, lasting=lasting)

    def retire(self, shown: str) -> None:
        """Writes the study to the results folder unless another one is there; removes this folder.

        It raises as `publish`, or if a search works here.
        """
        if not self._is_alone():
            raise self._changed(shown)
        if self._digest() in self._marked():
            with closing(sqlite3.connect(self.database)) as connection:
                self.publish(connection, shown, lasting=True)
        shutil.rmtree(self.folder)

    def close(self) -> None:
        os.close(self.in_use)

    def _write(self, content: bytes, *, lasting: bool) -> None:
        digest = hashlib.sha256(content).hexdigest()
        # Both until it is there: a kill in between leaves one of them.
        self._note(*self._marked(), digest)
        write_whole(self.published, content, lasting=lasting)
        self._note(digest)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self.in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self.in_use, fcntl.LOCK_SH)
        return True

    def _changed(self, shown: str) -> UsageError:
        return UsageError(
            f"{shown} was changed by somebody else, or on another host, while a search works on it",
            hint="what was found here is kept: run the same command again when no other search of "
            "it runs. Hosts share a study by --storage with a journal or a database server",
        )

    def _digest(self) -> str:
        """Returns the hash of the file in the results folder; empty if it is missing or empty."""
        if not self.published.exists() or not self.published.stat().st_size:
            return ""
        with open_regular(self.published, follow=False) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _marked(self) -> list[str]:
        with suppress(AutomeshError):
            text = read_bytes(self._mark, limit_bytes=limits.SMALL_RECORD_BYTES)
            return read_json(text, list[str])
        return []

    def _note(self, *digests: str) -> None:
        write_whole(self._mark, dumps(list(digests)))


def open_working_copy(published: Path, environ: Mapping[str, str] = os.environ) -> WorkingCopy:
    """Returns the folder in the user's cache in which a study is searched; makes it if needed.

    Raises:
      UsageError: there, too, others may write; or it cannot be made.
    """
    root = cache_root(environ) / _FOLDER
    folder = _folder_of(published, root)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise _no_place(root, reason) from None
    if reason := why_others_may_write(folder):
        raise _no_place(root, reason)
    in_use = os.open(folder / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(in_use, fcntl.LOCK_SH)
    return WorkingCopy(published=published, folder=folder, in_use=in_use)


def retire_working_copy(published: Path, shown: str, environ: Mapping[str, str]) -> None:
    """Moves a study back that is searched in its own folder from now on.

    It writes there what a killed search has left in the cache, and removes that.

    Raises:
      UsageError, OSError: as `WorkingCopy.publish`, or a search still works in the cache.
    """
    folder = _folder_of(published, cache_root(environ) / _FOLDER)
    if not (folder / _NAME).exists() or why_others_may_write(folder):
        return
    working = open_working_copy(published, environ)
    try:
        working.retire(shown)
    finally:
        working.close()


def _folder_of(published: Path, root: Path) -> Path:
    digest = hashlib.sha256(
        os.fsencode(Path(os.path.realpath(published.parent)) / published.name)
    ).hexdigest()[:16]
    return root / f"{published.parent.name[:80]}-{digest}"


def _no_place(root: Path, reason: str) -> UsageError:
    return UsageError(
        f"a study in a folder that others may write into is searched in `{root}`, and that cannot "
        f"be used: {reason}",
        hint=f"take the right to write from them (`chmod go-w`), or name a folder of your own with "
        f"--results or in {FOLDER_VARIABLE}",
    )
