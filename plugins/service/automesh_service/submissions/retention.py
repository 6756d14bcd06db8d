"""Removes old files of a service: drafts of killed servers, bundles that no submission uses, and,
if an option says so, submissions that ended long ago.

The audit is kept. Each step can be cut short at any moment: the next call continues.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from automesh import limits
from automesh_service.submissions.audit import Audit
from automesh_service.submissions.database import (
    ANSWERS,
    BUNDLES,
    CUTS,
    STATES,
    SUBMISSIONS,
    Database,
)
from automesh_service.submissions.elapsed import Elapsed
from automesh_service.submissions.home import Home
from automesh_service.submissions.process import find_search
from automesh_service.submissions.store import ENDED

_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Removes old files.

    Attributes:
      elapsed: counts for how long things have not changed, without the time of day.
      keep_s: seconds for which ended submissions and their studies are kept; None to keep all.
    """

    home: Home
    database: Database
    audit: Audit
    elapsed: Elapsed
    keep_s: float | None

    def remove_old(self) -> None:
        """Removes the files that are old enough now.

        Raises:
          OSError: the disk refuses.
        """
        bundles = self.home.folder / "bundles"
        # Drafts of killed servers: bundles that had not arrived completely, and states that were
        # being moved.
        drafts = {
            str(one): one for one in (*bundles.glob("*.draft"), *self.home.jobs.glob("*/*.draft"))
        }
        for name in self._unchanged("draft", drafts, limits.ABANDONED_DRAFT_S):
            _remove(drafts[name])
        if self.keep_s is not None:
            self._remove_submissions(self.keep_s)
        self._remove_bundles()

    def _unchanged(self, kind: str, places: Mapping[str, Path], age_s: float) -> set[str]:
        """Returns the names of files and folders that have not changed for `age_s`."""
        stamps = {name: _changed_s(place) for name, place in places.items()}
        return self.elapsed.unchanged(kind, stamps, age_s)

    def _remove_submissions(self, keep_s: float) -> None:
        table = SUBMISSIONS.c
        has_ended = table.state.in_(ENDED)
        with self.database.read() as connection:
            query = sa.select(table.number, table.owner, table.changed_s).where(has_ended)
            ended = {row.number: row for row in connection.execute(query)}
        stamps = {number: row.changed_s for number, row in ended.items()}
        old = sorted(self.elapsed.unchanged("submission", stamps, keep_s))
        for number in old[:_AT_ONCE]:
            if find_search(self.home.job(number)) is not None:
                continue  # Its process still runs, although the submission has ended.
            # Its owner may have queued it again in the meantime.
            is_same = sa.and_(table.number == number, has_ended, table.changed_s == stamps[number])
            with self.database.change() as connection:
                if not connection.execute(sa.delete(SUBMISSIONS).where(is_same)).rowcount:
                    continue
                connection.execute(sa.delete(ANSWERS).where(ANSWERS.c.submission == number))
                for of_it in (CUTS, STATES):
                    connection.execute(sa.delete(of_it).where(of_it.c.number == number))
            self.audit.note("removed", who=ended[number].owner, subject=number, said="old")
            shutil.rmtree(self.home.job(number), ignore_errors=True)
        self._remove_folders(keep_s)

    def _remove_folders(self, keep_s: float) -> None:
        """Removes folders whose submissions are gone: either their removal was cut short, or the
        database is a backup, and then the owner may still miss them."""
        with self.database.read() as connection:
            known = set(connection.execute(sa.select(SUBMISSIONS.c.number)).scalars())
        lost = {one.name: one for one in self.home.jobs.iterdir() if one.name not in known}
        for name in self._unchanged("folder", lost, keep_s):
            shutil.rmtree(lost[name])

    def _remove_bundles(self) -> None:
        table = BUNDLES.c
        used = sa.select(SUBMISSIONS.c.digest).where(
            SUBMISSIONS.c.owner == table.owner, SUBMISSIONS.c.digest == table.digest
        )
        with self.database.read() as connection:
            query = sa.select(table.owner, table.digest, table.made_s).where(~used.exists())
            unused = {f"{row.digest} {row.owner}": row for row in connection.execute(query)}
        stamps = {name: row.made_s for name, row in unused.items()}
        old = self.elapsed.unchanged("bundle", stamps, limits.BUNDLE_UNUSED_S)
        if not old:
            return
        with self.database.change() as connection:
            for row in (unused[name] for name in old):
                # Its owner may have sent or used it again in the meantime.
                is_same = sa.and_(table.owner == row.owner, table.digest == row.digest)
                is_same = sa.and_(is_same, table.made_s == row.made_s, ~used.exists())
                connection.execute(sa.delete(BUNDLES).where(is_same))
            gone = {unused[name].digest for name in old}
            others = sa.select(table.digest).where(table.digest.in_(gone))
            gone -= set(connection.execute(others).scalars())
            # Inside the transaction, so that nobody can send them anew at the same time.
            for digest in gone:
                self.home.bundle(digest).unlink(missing_ok=True)


def _remove(draft: Path) -> None:
    """Removes a file, or a folder with its contents."""
    if draft.is_dir() and not draft.is_symlink():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        draft.unlink(missing_ok=True)


def _changed_s(path: Path) -> float:
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0
