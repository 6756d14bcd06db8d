"""The table of leases, in a database (SQLite, PostgreSQL, MySQL) or in a file next to a journal."""

from __future__ import annotations

import copy
import json
import math
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import sqlalchemy as sa
import sqlalchemy.exc as sa_errors
from filelock import FileLock

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.files import write_whole
from automesh.jsonio import from_json, read_json, to_json
from automesh.reading import read_bytes
from automesh.skipped import Skipped
from automesh.tuner.study.lease import LeaseRow, Owner, Sightings

_TABLE = sa.Table(
    "automesh_holds",
    sa.MetaData(),
    sa.Column("hold_key", sa.String(512), primary_key=True),
    sa.Column("owner", sa.String(512), nullable=False),
    sa.Column("renewed_s", sa.Double(), nullable=False),
    sa.Column("version", sa.BigInteger(), nullable=False),
)
_CLOCKS = {
    "postgresql": "SELECT extract(epoch FROM clock_timestamp())",
    "mysql": "SELECT unix_timestamp(now(6))",
    "mariadb": "SELECT unix_timestamp(now(6))",
}


class SqlLeases:
    """The leases in a table next to Optuna's; each change is one statement: nothing is ever
    locked."""

    def __init__(
        self, engine: sa.Engine, skipped: Skipped | None = None, *, is_read_only: bool = False
    ) -> None:
        """Makes the table if there is none; where nothing may be written it counts as empty."""
        self._skipped = Skipped() if skipped is None else skipped
        # Single statements need no transaction, and SQLite must not keep a read snapshot open.
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._is_there = not is_read_only or sa.inspect(engine).has_table(_TABLE.name)
        if not is_read_only:
            _TABLE.create(engine, checkfirst=True)
        clock = _CLOCKS.get(engine.dialect.name)
        self._clock = sa.text(clock) if clock else None
        self.seen = Sightings()

    def noting(self, skipped: Skipped) -> Self:
        """Returns the same table with the same sightings; it adds damaged rows to `skipped`."""
        other = copy.copy(self)
        other._skipped = skipped
        return other

    def now(self) -> float:
        # SQLite in WAL mode is shared within one host only: one clock.
        return time.time() if self._clock is None else float(self._rows(self._clock)[0][0])

    def get(self, key: str) -> LeaseRow | None:
        rows = self._leases(_TABLE.c.hold_key == key)
        return self._read(rows[0]) if rows else None

    def under(self, prefix: str) -> dict[str, LeaseRow]:
        rows = self._leases(_TABLE.c.hold_key.startswith(prefix, autoescape=True))
        found = map(self._read, rows)
        return {row.key: row for row in found if row is not None}

    def _read(self, row: sa.Row[Any]) -> LeaseRow | None:
        """Reads the lease of a row; None if it is damaged, so that nobody can renew it."""
        try:
            return _from_row(row)
        except AutomeshError as error:
            self._skipped.note(f"the hold `{row.hold_key}`", error)
            return None

    def swap(self, key: str, old: LeaseRow | None, owner: Owner | None) -> bool:
        if old is None:
            return owner is not None and (self._insert(key, owner) or self._replace(key, owner))
        unchanged = sa.and_(_TABLE.c.hold_key == key, _TABLE.c.version == old.version)
        unchanged = sa.and_(unchanged, _TABLE.c.owner == _owner_text(old.owner))
        if owner is None:
            return self._changed(sa.delete(_TABLE).where(unchanged)) == 1
        values = {"owner": _owner_text(owner), "renewed_s": self.now(), "version": old.version + 1}
        return self._changed(sa.update(_TABLE).where(unchanged).values(values)) == 1

    def _insert(self, key: str, owner: Owner) -> bool:
        row = {"hold_key": key, "owner": _owner_text(owner), "renewed_s": self.now()}
        row["version"] = _first_version()
        try:
            self._changed(sa.insert(_TABLE).values(row))
        except sa_errors.IntegrityError:
            return False
        return True

    def _replace(self, key: str, owner: Owner) -> bool:
        """Takes a key whose row is damaged, unless the row has changed since it was read."""
        rows = self._rows(sa.select(_TABLE).where(_TABLE.c.hold_key == key))
        if not rows or self._read(rows[0]) is not None:
            return False
        same = sa.and_(_TABLE.c.hold_key == key, _TABLE.c.owner == rows[0].owner)
        values = {
            "owner": _owner_text(owner),
            "renewed_s": self.now(),
            "version": _first_version(),
        }
        return self._changed(sa.update(_TABLE).where(same).values(values)) == 1

    def renew(self, owner: Owner) -> None:
        values: dict[str, Any] = {"renewed_s": self.now(), "version": _TABLE.c.version + 1}
        mine = _TABLE.c.owner == _owner_text(owner)
        self._changed(sa.update(_TABLE).where(mine).values(values))

    def close(self) -> None:
        self._engine.dispose()

    def _leases(self, where: sa.ColumnElement[bool]) -> Sequence[sa.Row[Any]]:
        return self._rows(sa.select(_TABLE).where(where)) if self._is_there else ()

    def _rows(self, statement: sa.Executable) -> Sequence[sa.Row[Any]]:
        with self._engine.connect() as connection:
            return connection.execute(statement).all()

    def _changed(self, statement: sa.Executable) -> int:
        with self._engine.connect() as connection:
            return connection.execute(statement).rowcount


class FileLeases:
    """Leases in a JSON file, replaced whole under a lock that the kernel releases at death."""

    def __init__(self, path: Path, skipped: Skipped | None = None) -> None:
        self._path = path
        self._skipped = Skipped() if skipped is None else skipped
        self.seen = Sightings()
        self._lock = FileLock(f"{path}.flock", timeout=limits.LOCK_S, poll_interval=0.002)
        with self._lock:  # makes the lock's file, which is also the clock
            pass

    def now(self) -> float:
        # The file system's clock: hosts that share it over NFS agree on it.
        os.utime(self._lock.lock_file, follow_symlinks=False)
        return Path(self._lock.lock_file).lstat().st_mtime

    def get(self, key: str) -> LeaseRow | None:
        return self._read().get(key)

    def under(self, prefix: str) -> dict[str, LeaseRow]:
        return {key: row for key, row in self._read().items() if key.startswith(prefix)}

    def swap(self, key: str, old: LeaseRow | None, owner: Owner | None) -> bool:
        with self._lock:
            leases = self._read()
            if leases.get(key) != old or (old is None and owner is None):
                return False
            if owner is None:
                del leases[key]
            else:
                version = _first_version() if old is None else old.version + 1
                leases[key] = LeaseRow(key=key, owner=owner, renewed_s=self.now(), version=version)
            self._write(leases)
            return True

    def renew(self, owner: Owner) -> None:
        with self._lock:
            now_s, leases = self.now(), self._read()
            for key, row in leases.items():
                if row.owner == owner:
                    leases[key] = LeaseRow(
                        key=key, owner=owner, renewed_s=now_s, version=row.version + 1
                    )
            self._write(leases)

    def close(self) -> None:
        self._lock.release()

    def _read(self) -> dict[str, LeaseRow]:
        if not os.path.lexists(self._path):
            return {}
        text = read_bytes(self._path, limit_bytes=limits.HOLDS_BYTES).strip(b"\0")
        if not text:  # a power cut may leave the name without the content
            return {}
        try:
            rows: list[Any] = read_json(text, list[Any])
        except AutomeshError as error:
            raise UsageError(
                f"the file `{self._path}` is damaged",
                hint="delete it while no search runs: it only says which process runs what",
            ) from error
        found = [self._lease(number, row) for number, row in enumerate(rows, start=1)]
        return {row.key: row for row in found if row is not None}

    def _lease(self, number: int, row: Any) -> LeaseRow | None:
        """Reads a lease of the file; None if it is damaged: the next change removes it."""
        try:
            return _sound(from_json(row, LeaseRow))
        except AutomeshError as error:
            self._skipped.note(f"hold {number} of `{self._path.name}`", error)
            return None

    def _write(self, leases: dict[str, LeaseRow]) -> None:
        # Not lasting: after a power cut no owner is alive, and a lost hold is a free one.
        text = json.dumps(to_json(list(leases.values()), list[LeaseRow]))
        write_whole(self._path, text, lasting=False)


def _first_version() -> int:
    # Random: a key that was given back and taken again must not look unchanged.
    return secrets.randbits(40)


def _owner_text(owner: Owner) -> str:
    return json.dumps(to_json(owner, Owner), sort_keys=True)


def _from_row(row: Any) -> LeaseRow:
    """Reads a row; SQLite may keep a value of any type in it.

    Raises:
      AutomeshError: it is damaged.
    """
    said = {"key": row.hold_key, "renewed_s": row.renewed_s, "version": row.version}
    owner: Owner = read_json(row.owner if isinstance(row.owner, str) else "", Owner)
    return _sound(from_json({**said, "owner": to_json(owner, Owner)}, LeaseRow))


def _sound(row: LeaseRow) -> LeaseRow:
    if not math.isfinite(row.renewed_s):  # It would never end.
        raise UsageError(f"it was renewed at {row.renewed_s} s")
    return row
