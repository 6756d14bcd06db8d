"""Bundles and submissions of a service; each change is one transaction.

    queued -> running -> found | nothing | failed
      |          |
      +----------+-> cancelled          resume, extend: queued again

If the runner of a running submission is gone, the next runner finds the submission and continues
it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa

from automesh import limits
from automesh.errors import UsageError
from automesh.files import move_whole
from automesh.jsonio import dumps, read_json
from automesh.units import format_bytes
from automesh_service.submissions.bundle import Bundle
from automesh_service.submissions.database import (
    ANSWERS,
    BUNDLES,
    CUTS,
    LEASES,
    STATES,
    SUBMISSIONS,
    Database,
)
from automesh_service.submissions.home import Home
from automesh_service.submissions.order import Order, checked

State = Literal["queued", "running", "found", "nothing", "failed", "cancelled"]
OPEN: tuple[State, ...] = ("queued", "running")
ENDED: tuple[State, ...] = ("found", "nothing", "failed", "cancelled")
_MOST_CUTS = 5
"""The most runs of one submission that may be killed from outside, since its owner queued it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A search that a user submitted.

    Attributes:
      number: 16 hexadecimal digits.
      owner: name of the user who submitted it.
      digest: the hash of its bundle.
      state: `found` with a rule, `nothing` without one, `failed` if the search could not be run.
      said: one sentence on how it ended; empty before.
      is_cancelled: whether it was cancelled.
      runs: how often a search was started for it.
      made_s, changed_s: seconds since 1970.
    """

    number: str
    owner: str
    digest: str
    order: Order
    state: State
    said: str
    is_cancelled: bool
    runs: int
    made_s: float
    changed_s: float


Note = Callable[[sa.Connection, Submission], None]
"""Records a change of a submission, in the transaction that makes it."""


def _no_note(connection: sa.Connection, submission: Submission) -> None:
    """Records nothing."""
    del connection, submission


class Conflict(UsageError):
    """The request contradicts an earlier one, or the state of the submission."""


class Lapsed(Conflict):
    """An agent named a submission that does not belong to it, or not any more."""


class TooMany(UsageError):
    """A user has too many submissions that have not ended, or too many bytes of bundles."""


class Missing(UsageError):
    """The bundle or submission does not exist, or this user may not see it."""


class Store:
    """The bundles and submissions of a service."""

    def __init__(
        self, home: Home, database: Database, clock: Callable[[], float] = time.time
    ) -> None:
        self._home = home
        self._database = database
        self._clock = clock

    # Bundles

    def keep_bundle(self, draft: Path, bundle: Bundle, owner: str) -> None:
        """Keeps a checked bundle for its owner; `draft` is moved to its final place.

        A user who sends the same bytes owns the bundle as well; nobody learns who else owns it.

        Raises:
          TooMany: the bundles of this owner have more bytes than a user may have.
        """
        row = {
            "digest": bundle.digest,
            "owner": owner,
            "packed_bytes": bundle.packed_bytes,
            "files": dumps(list(bundle.files)),
            "made_s": self._clock(),
        }
        others = sa.and_(BUNDLES.c.owner == owner, BUNDLES.c.digest != bundle.digest)
        with self._database.change() as connection:
            total = sa.select(sa.func.sum(BUNDLES.c.packed_bytes)).where(others)
            there = connection.execute(total).scalar_one() or 0
            if there + bundle.packed_bytes > limits.BUNDLES_OF_ONE_BYTES:
                raise TooMany(
                    f"bundles of yours take {format_bytes(there)} already",
                    hint="those that no submission uses are removed after a week",
                )
            # An existing file is replaced, too: a power cut may have damaged it. This is done
            # inside the transaction, so that the bundle is not removed as an old one meanwhile.
            move_whole(draft, self._home.bundle(bundle.digest))
            connection.execute(sa.insert(BUNDLES).prefix_with("OR REPLACE").values(row))

    def bundle(self, digest: str, owner: str | None) -> Bundle:
        """Returns a bundle that a user has sent.

        Args:
          owner: the user; None for one who may see all bundles.

        Raises:
          Missing: there is no such bundle, or only other users have it.
        """
        with self._database.read() as connection:
            return self._bundle(connection, digest, owner)

    def _bundle(self, connection: sa.Connection, digest: str, owner: str | None) -> Bundle:
        query = sa.select(BUNDLES).where(BUNDLES.c.digest == digest)
        if owner is not None:
            query = query.where(BUNDLES.c.owner == owner)
        row = connection.execute(query.limit(1)).one_or_none()
        if row is None or not self._home.bundle(digest).exists():
            raise Missing(
                f"there is no bundle `{digest[:12]}` of yours", hint="send it first, with PUT"
            )
        files = tuple(read_json(row.files, list[str]))
        return Bundle(digest=digest, packed_bytes=row.packed_bytes, files=files)

    # Submissions

    def submit(self, order: Order, digest: str, *, owner: str, key: str) -> tuple[Submission, bool]:
        """Makes a submission from an order, once for each key.

        Args:
          key: a text that the client chooses; a second call with the same key and order returns the
            first submission, also if the first answer got lost.

        Returns:
          The submission, and whether it was made now.

        Raises:
          Missing: this owner has no such bundle.
          Conflict: the key was used for another order.
          TooMany: too many submissions of this owner have not ended.
          UsageError: the order cannot be run.
        """
        checked(order)
        text = dumps(order.to_json())
        request = hashlib.sha256(f"submit {digest} {text}".encode()).hexdigest()
        now_s = self._clock()
        with self._database.change() as connection:
            if (known := _answered(connection, owner, key, request)) is not None:
                return _one(connection, known), False
            files = self._bundle(connection, digest, owner).files
            for name in order.files:
                if name not in files:
                    raise UsageError(f"there is no file `{name}` in the bundle")
            _check_room(connection, owner)
            number = secrets.token_hex(8)
            row = {
                "number": number,
                "owner": owner,
                "digest": digest,
                "order": text,
                "state": "queued",
                "said": "",
                "is_cancelled": False,
                "runs": 0,
                "made_s": now_s,
                "changed_s": now_s,
            }
            connection.execute(sa.insert(SUBMISSIONS).values(row))
            _answer(connection, owner, key, request, number, now_s)
            return _one(connection, number), True

    def get(self, number: str, owner: str | None) -> Submission:
        """Returns a submission; `owner` as for `bundle`.

        Raises:
          Missing: there is no such submission, or it belongs to another user.
        """
        with self._database.read() as connection:
            return _one(connection, number, owner)

    def listed(
        self,
        owner: str | None = None,
        *,
        states: Sequence[State] = (),
        skip: int = 0,
        count: int = limits.PAGE_SIZE,
    ) -> tuple[list[Submission], int]:
        """Returns a page of submissions, the latest first, and how many there are in all."""
        where = [] if owner is None else [SUBMISSIONS.c.owner == owner]
        where += [SUBMISSIONS.c.state.in_(states)] if states else []
        query = sa.select(SUBMISSIONS).where(*where)
        query = query.order_by(SUBMISSIONS.c.made_s.desc(), SUBMISSIONS.c.number)
        total = sa.select(sa.func.count()).select_from(SUBMISSIONS).where(*where)
        with self._database.read() as connection:
            rows = connection.execute(query.offset(skip).limit(count)).mappings().all()
            return [_submission(row) for row in rows], connection.execute(total).scalar_one()

    def cancel(self, number: str, owner: str | None) -> Submission:
        """Ends a submission: a waiting one at once, a running one as Ctrl-C would. A second call
        does nothing.

        Raises:
          Missing: as for `get`.
        """
        with self._database.change() as connection:
            found = _one(connection, number, owner)
            if found.state == "queued":
                said = "cancelled before it began"
                self._set(connection, number, state="cancelled", is_cancelled=True, said=said)
            elif found.state == "running":
                self._set(connection, number, is_cancelled=True)
            return _one(connection, number)

    def resume(self, number: str, owner: str | None) -> Submission:
        """Queues an ended submission again: its search continues where it was. One that has not
        ended stays as it is.

        Raises:
          Missing: as for `get`.
          Conflict: it was cancelled, and has not ended yet.
          TooMany: as for `submit`.
        """
        with self._database.change() as connection:
            found = _one(connection, number, owner)
            if found.state == "running" and found.is_cancelled:
                raise Conflict("the submission is being cancelled", hint="try again in a moment")
            if found.state in ENDED:
                self._queue(connection, found)
            return _one(connection, number)

    def extend(
        self, number: str, budget: str, *, owner: str | None, who: str, key: str
    ) -> Submission:
        """Queues a submission again with another budget for its next run; once for each key.

        Raises:
          Missing: as for `get`.
          Conflict: it runs, or the key was used for something else.
          TooMany: as for `submit`.
          UsageError: the budget is not allowed.
        """
        request = hashlib.sha256(f"extend {number} {budget}".encode()).hexdigest()
        with self._database.change() as connection:
            found = _one(connection, number, owner)
            if _answered(connection, who, key, request) is not None:
                return found
            if found.state == "running":
                raise Conflict("the submission runs", hint="cancel it first, or wait for its end")
            text = dumps(found.order.with_budget(budget).to_json())
            self._queue(connection, found, order=text)
            _answer(connection, who, key, request, number, self._clock())
            return _one(connection, number)

    def counts(self) -> dict[str, int]:
        """Returns how many submissions are in each state."""
        query = sa.select(SUBMISSIONS.c.state, sa.func.count()).group_by(SUBMISSIONS.c.state)
        with self._database.read() as connection:
            return {str(state): int(count) for state, count in connection.execute(query)}

    # The part below is used by the one runner, and for agents, which have leases.

    def start_next(
        self,
        suits: Callable[[Order], bool] = lambda order: not order.needs,
        *,
        lease: Mapping[str, str] | None = None,
        note: Note = _no_note,
    ) -> Submission | None:
        """Starts the submission that has waited longest, and returns it; None if none waits.

        Args:
          suits: whether the runner or the agent can run an order.
          lease: the columns of the agent's lease: `lease`, `holder`, `agent` and `place`.
          note: is called with the changed submission.
        """
        query = sa.select(SUBMISSIONS).where(SUBMISSIONS.c.state == "queued")
        query = query.order_by(SUBMISSIONS.c.changed_s, SUBMISSIONS.c.number)
        # Most calls find nothing: these do not lock the database.
        with self._database.read() as connection:
            if connection.execute(query.limit(1)).one_or_none() is None:
                return None
        with self._database.change() as connection:
            waiting = map(_submission, connection.execute(query).mappings())
            found = next((one for one in waiting if suits(one.order)), None)
            if found is None:
                return None
            run = found.runs + 1
            self._set(connection, found.number, state="running", runs=run)
            connection.execute(sa.delete(LEASES).where(LEASES.c.number == found.number))
            if lease is not None:
                row = {"number": found.number, "run": run, **lease}
                connection.execute(sa.insert(LEASES).values(row))
            else:
                # The runner continues in the folder itself: the last state of an agent will soon be
                # outdated.
                connection.execute(sa.delete(STATES).where(STATES.c.number == found.number))
            return _noted(connection, found.number, note)

    def left_running(self) -> list[Submission]:
        """Returns the running submissions that no agent has: a former runner has started them."""
        leased = sa.select(LEASES.c.number)
        query = sa.select(SUBMISSIONS).where(
            SUBMISSIONS.c.state == "running", SUBMISSIONS.c.number.not_in(leased)
        )
        with self._database.read() as connection:
            return [_submission(row) for row in connection.execute(query).mappings()]

    def end(
        self, number: str, state: State, said: str, *, lease: str = "", note: Note = _no_note
    ) -> Submission:
        """Records how the run of a submission has ended.

        Args:
          lease: the lease of the agent that reports it.
          note: is called with the changed submission.

        Raises:
          Lapsed: its lease has ended.
        """
        with self._database.change() as connection:
            _end_lease(connection, number, lease)
            self._set(connection, number, state=state, said=said)
            return _noted(connection, number, note)

    def cut(
        self, number: str, *, is_meant: bool, lease: str = "", note: Note = _no_note
    ) -> Submission:
        """Records that the run of a submission was cut short. The submission is queued again,
        unless it was cancelled or this has happened too often.

        Args:
          is_meant: whether its runner or agent was asked to end; such a cut is not counted.
          lease, note: as for `end`; raises as `end`.
        """
        mine = CUTS.c.number == number
        with self._database.change() as connection:
            _end_lease(connection, number, lease)
            # Read in the same transaction: a cancel that came a moment ago is not lost.
            if _one(connection, number).is_cancelled:
                said = "cancelled; resume it to go on"
                self._set(connection, number, state="cancelled", said=said)
                return _noted(connection, number, note)
            before = connection.execute(sa.select(CUTS.c.count).where(mine)).scalar_one_or_none()
            count = (before or 0) + (not is_meant)
            if before is None:
                connection.execute(sa.insert(CUTS).values(number=number, count=count))
            else:
                connection.execute(sa.update(CUTS).where(mine).values(count=count))
            if count >= _MOST_CUTS:
                said = f"the search was ended {count} times"
                self._set(connection, number, state="failed", said=said)
            else:
                said = "the search was cut short, and goes on"
                self._set(connection, number, state="queued", said=said)
            return _noted(connection, number, note)

    def _queue(self, connection: sa.Connection, found: Submission, **values: Any) -> None:
        """Queues a submission for its owner; forgets how often its former runs were cut short."""
        if found.state in ENDED:
            _check_room(connection, found.owner)
        connection.execute(sa.delete(CUTS).where(CUTS.c.number == found.number))
        self._set(connection, found.number, state="queued", is_cancelled=False, said="", **values)

    def _set(self, connection: sa.Connection, number: str, **values: Any) -> None:
        connection.execute(
            sa.update(SUBMISSIONS)
            .where(SUBMISSIONS.c.number == number)
            .values(changed_s=self._clock(), **values)
        )


def _end_lease(connection: sa.Connection, number: str, lease: str) -> None:
    """Ends the lease of a submission.

    Args:
      lease: the lease that the submission must have; empty for none.

    Raises:
      Lapsed: it has another one, or none.
    """
    mine = sa.delete(LEASES).where(LEASES.c.number == number, LEASES.c.lease == lease)
    if lease and not connection.execute(mine).rowcount:
        raise Lapsed("the lease has ended: the submission is somebody else's now")


def _check_room(connection: sa.Connection, owner: str) -> None:
    """Raises TooMany for an owner who already has as many unended submissions as allowed."""
    waiting = connection.execute(
        sa.select(sa.func.count())
        .select_from(SUBMISSIONS)
        .where(SUBMISSIONS.c.owner == owner, SUBMISSIONS.c.state.in_(OPEN))
    ).scalar_one()
    if waiting >= limits.PENDING_SUBMISSIONS:
        raise TooMany(f"{waiting} searches of yours have not ended yet")


def _answered(connection: sa.Connection, owner: str, key: str, request: str) -> str | None:
    """Returns the submission that an earlier request with the same key made or changed.

    Raises:
      Conflict: that request asked for something else.
    """
    mine = sa.and_(ANSWERS.c.owner == owner, ANSWERS.c.key == key)
    row = connection.execute(sa.select(ANSWERS).where(mine)).one_or_none()
    if row is None:
        return None
    if row.request != request:
        raise Conflict(
            "the idempotency key was used for another request",
            hint="take a new key for a new request, the same one to repeat one",
        )
    return str(row.submission)


def _answer(
    connection: sa.Connection, owner: str, key: str, request: str, number: str, now_s: float
) -> None:
    row = {"owner": owner, "key": key, "request": request, "submission": number, "made_s": now_s}
    connection.execute(sa.insert(ANSWERS).values(row))


def _one(connection: sa.Connection, number: str, owner: str | None = None) -> Submission:
    query = sa.select(SUBMISSIONS).where(SUBMISSIONS.c.number == number)
    if owner is not None:
        query = query.where(SUBMISSIONS.c.owner == owner)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise Missing(f"there is no submission `{number[:16]}` of yours")
    return _submission(row)


def _noted(connection: sa.Connection, number: str, note: Note) -> Submission:
    found = _one(connection, number)
    note(connection, found)
    return found


def _submission(row: sa.RowMapping) -> Submission:
    return Submission(**{**row, "order": read_json(row["order"], Order)})
