"""The audit: who did what, and what was refused to them. Entries are only ever added.

The database refuses to change or remove a row of it, so neither a bug nor a request can do that.
Only the owner of the file can, by writing to the file itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from automesh.texts.terminal import clean, shortened
from automesh_service.submissions.database import AUDIT, Database
from automesh_service.submissions.store import Note, Submission

_CHARS = 300  # of each word: the texts of refused requests may be anything


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One action that was done or refused.

    Attributes:
      number: from 1, in the order of time.
      at_s: seconds since 1970.
      who: name of the holder of the token; empty if there was no valid one.
      address: where the request came from.
      action: such as `POST /v1/studies`, or what the runner did.
      subject: the thing that was changed.
      status: the HTTP status of the answer; 0 where there was none.
      said: why it was refused; empty if it was not.
    """

    number: int
    at_s: float
    who: str
    address: str
    action: str
    subject: str
    status: int
    said: str


class Audit:
    """The audit of a service."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def note(
        self,
        action: str,
        *,
        who: str = "",
        address: str = "",
        subject: str = "",
        status: int = 0,
        said: str = "",
        within: sa.Connection | None = None,
    ) -> None:
        """Adds an entry.

        Args:
          within: the transaction of the change that is recorded: the entry exists if and only if
            the change was made, whenever the process is killed. None for a transaction of its own.
        """
        texts = {"who": who, "address": address, "action": action, "subject": subject, "said": said}
        row: dict[str, Any] = {name: shortened(clean(text), _CHARS) for name, text in texts.items()}
        entry = sa.insert(AUDIT).values(**row, status=status, at_s=self._clock())
        if within is not None:
            within.execute(entry)
            return
        with self._database.change() as connection:
            connection.execute(entry)

    def noting(self, action: str, said: Callable[[str], str]) -> Note:
        """Returns a function that records a change of a submission, in the transaction that makes
        it.

        Args:
          said: takes the new state of the submission and returns the text of the entry.
        """

        def note(connection: sa.Connection, found: Submission) -> None:
            self.note(
                action,
                who=found.owner,
                subject=found.number,
                said=said(found.state),
                within=connection,
            )

        return note

    def entries(self, *, before: int | None = None, count: int = 100) -> list[AuditEntry]:
        """Returns entries, the latest first.

        Args:
          before: number of an entry; only older entries are returned. None to begin with the
            latest.
        """
        query = sa.select(AUDIT).order_by(AUDIT.c.number.desc()).limit(count)
        if before is not None:
            query = query.where(AUDIT.c.number < before)
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        return [AuditEntry(**row) for row in rows]
