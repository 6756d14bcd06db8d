"""What a service removes by itself: drafts of killed servers, bundles that nobody has used, and, if
it is told to, submissions that have ended long ago.

The audit keeps what was done. Each step can be cut short at any moment: the next time goes on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from automesh import limits
from automesh.submissions.audit import Audit
from automesh.submissions.database import (
    ANSWERS,
    BUNDLES,
    CUTS,
    STATES,
    SUBMISSIONS,
    Database,
)
from automesh.submissions.home import Home
from automesh.submissions.process import find_search
from automesh.submissions.store import ENDED

_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Removes what is old.

    Attributes:
      keep_s: age from which on submissions that have ended are removed, with their studies; None
        to keep all.
    """

    home: Home
    database: Database
    audit: Audit
    keep_s: float | None
    clock: Callable[[], float] = time.time

    def remove_old(self) -> None:
        """Removes what is old enough now.

        Raises:
          OSError: the disk refuses.
        """
        now_s = self.clock()
        bundles = self.home.folder / "bundles"
        # Of servers that were killed: bundles that had not arrived, states that were put in place.
        for draft in (*bundles.glob("*.draft"), *self.home.jobs.glob("*/*.draft")):
            if _changed_s(draft) < now_s - limits.ABANDONED_DRAFT_S:
                _remove(draft)
        if self.keep_s is not None:
            self._remove_submissions(now_s - self.keep_s)
        self._remove_bundles(now_s - limits.BUNDLE_UNUSED_S)

    def _remove_submissions(self, before_s: float) -> None:
        is_old = sa.and_(SUBMISSIONS.c.state.in_(ENDED), SUBMISSIONS.c.changed_s < before_s)
        with self.database.read() as connection:
            old = connection.execute(sa.select(SUBMISSIONS).where(is_old).limit(_AT_ONCE)).all()
        for row in old:
            if find_search(self.home.job(row.number)) is not None:
                continue  # Its process has not ended, whatever was said of it.
            mine = SUBMISSIONS.c.number == row.number
            with self.database.change() as connection:
                # Its owner may have queued it again since.
                if not connection.execute(sa.delete(SUBMISSIONS).where(mine, is_old)).rowcount:
                    continue
                connection.execute(sa.delete(ANSWERS).where(ANSWERS.c.submission == row.number))
                for table in (CUTS, STATES):
                    connection.execute(sa.delete(table).where(table.c.number == row.number))
            self.audit.note("removed", who=row.owner, subject=row.number, said="old")
        self._remove_folders(before_s)

    def _remove_folders(self, before_s: float) -> None:
        """Removes folders whose submissions are gone, also of a removal that was cut short."""
        with self.database.read() as connection:
            known = set(connection.execute(sa.select(SUBMISSIONS.c.number)).scalars())
        for job in self.home.jobs.iterdir():
            # Which were made in the meantime are younger.
            if job.name not in known and _changed_s(job / "process.json") < before_s:
                shutil.rmtree(job)

    def _remove_bundles(self, before_s: float) -> None:
        used = sa.select(SUBMISSIONS.c.digest).where(
            SUBMISSIONS.c.owner == BUNDLES.c.owner, SUBMISSIONS.c.digest == BUNDLES.c.digest
        )
        unused = sa.and_(BUNDLES.c.made_s < before_s, ~used.exists())
        with self.database.change() as connection:
            gone = set(connection.execute(sa.select(BUNDLES.c.digest).where(unused)).scalars())
            connection.execute(sa.delete(BUNDLES).where(unused))
            others = sa.select(BUNDLES.c.digest).where(BUNDLES.c.digest.in_(gone))
            gone -= set(connection.execute(others).scalars())
            # While nobody can send them anew.
            for digest in gone:
                self.home.bundle(digest).unlink(missing_ok=True)


def _remove(draft: Path) -> None:
    """Removes a file, or a folder with what is in it."""
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


def _changed_s(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0
