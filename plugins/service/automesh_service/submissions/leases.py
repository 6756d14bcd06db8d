"""Leases: which agent works on which submission, and which of its messages still count.

    take -> (beat | add_log | keep_state)* -> end
      |
      +--- nothing heard for `LEASE_S` -> end_lost: the submission is queued again

A lease is identified by 128 random bits and belongs to the holder of the token that took it. A
submission has at most one lease. Each transaction that changes something checks that the lease is
still the current one: an agent that was lost and comes back finds its lease gone, and cannot change
the results of another agent. The time of the last message of an agent is kept in memory, by a
monotonic clock: after a restart of the server each agent again has the full `LEASE_S`."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from automesh import limits
from automesh.errors import AutomeshError, UsageError
from automesh.files import move_whole, open_log, write_whole
from automesh.tuner.study.identity import submission_in
from automesh_service.submissions.audit import Audit
from automesh_service.submissions.bundle import BadBundle, unpack
from automesh_service.submissions.database import LEASES, STATES, Database
from automesh_service.submissions.home import Home
from automesh_service.submissions.order import Order
from automesh_service.submissions.state import (
    RESULTS,
    check_state,
    check_studies,
    pack_state,
    put_in_place,
)
from automesh_service.submissions.store import Lapsed, Store, Submission
from automesh_service.submissions.verdict import end_run

_MOST_AGENTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The description that an agent gives of itself.

    Attributes:
      name: name of the agent, for people.
      takes: patterns of targets that it searches for, as `cpu:*`.
      has: what its host has; a submission may need some of it.
      place: its folder, in which a person can look for what a lost agent has left.
    """

    name: str
    takes: tuple[str, ...]
    has: tuple[str, ...]
    place: str
    cores: int
    memory_bytes: int

    def suits(self, order: Order) -> bool:
        """Whether an order suits this agent."""
        is_taken = all(any(fnmatchcase(one, p) for p in self.takes) for one in order.targets)
        return is_taken and set(order.needs) <= set(self.has)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenAgent:
    """An agent, as its last message described it.

    Attributes:
      running: number of the submission that it works on; empty for none.
      started_s, seen_s: seconds since 1970.
    """

    offer: Offer
    running: str
    started_s: float
    seen_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A submission that an agent works on.

    Attributes:
      id: the agent sends it with each request.
      run: number of this run of the submission; grows with each run.
      log_bytes: bytes of the log that the service has.
      state_run: the run that sent the last state, from which this run can continue; 0 for none.
    """

    id: str
    number: str
    run: int
    digest: str
    order: Order
    log_bytes: int
    state_run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The answer to an agent's beat."""

    is_cancelled: bool
    log_bytes: int


class Replayed(UsageError):
    """The state is not newer than the one that was sent before."""


@dataclass(kw_only=True)
class Leases:
    """The leases of a service.

    Attributes:
      is_foreign: whether a study whose name contains no submission belongs to something else than
        the submission; raises UsageError while that is not known.
    """

    home: Home
    database: Database
    store: Store
    audit: Audit
    is_foreign: Callable[[str, Path], bool]
    clock: Callable[[], float] = time.monotonic
    agents: dict[str, SeenAgent] = field(default_factory=dict[str, SeenAgent])
    _heard_s: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self._since_s = self.clock()
        self._lock = threading.Lock()

    # An agent without work

    def take(self, holder: str, offer: Offer, lease: str = "") -> Lease | None:
        """Starts, of the submissions that suit an agent, the one that has waited longest. Returns
        None if none suits.

        Args:
          lease: the id of the lease, 32 hexadecimal digits; an agent that got no answer asks again
            with the same id and gets the same submission. Empty: an id is made here.

        Raises:
          Lapsed: the lease belongs to another holder.
        """
        self._see(holder, offer)
        if lease and (given := self._given(lease, holder, offer)) is not None:
            return given
        lease = lease or secrets.token_hex(16)
        row = {"lease": lease, "holder": holder, "agent": offer.name, "place": offer.place}
        note = self.audit.noting("run", lambda _: f"by {holder}/{offer.name}")
        # Before anybody can see the lease and take its agent for lost.
        self._heard_s[lease] = self.clock()
        found = None
        try:
            found = self.store.start_next(offer.suits, lease=row, note=note)
        finally:
            if found is None:
                del self._heard_s[lease]
        if found is None:
            return None
        self._see(holder, offer, found.number)
        return self._told(lease, found)

    def _given(self, lease: str, holder: str, offer: Offer) -> Lease | None:
        """Returns the lease that an agent was given in an answer that got lost; None if there was
        none."""
        with self.database.read() as connection:
            row = connection.execute(sa.select(LEASES).where(LEASES.c.lease == lease)).one_or_none()
        if row is None:
            return None
        if row.holder != holder:
            raise Lapsed("the lease is somebody else's")
        self._heard_s[lease] = self.clock()
        self._see(holder, offer, row.number)
        return self._told(lease, self.store.get(row.number, None))

    def _told(self, lease: str, found: Submission) -> Lease:
        """Returns the lease as it is sent to the agent."""
        with self.database.read() as connection:
            query = sa.select(STATES.c.run).where(STATES.c.number == found.number)
            state_run = connection.execute(query).scalar_one_or_none()
        if state_run is None:
            state_run = self._pack_left(found)
        return Lease(
            id=lease,
            number=found.number,
            run=found.runs,
            digest=found.digest,
            order=found.order,
            log_bytes=_size(self._log(found.number)),
            state_run=state_run,
        )

    def _pack_left(self, found: Submission) -> int:
        """Packs the results that the service's own runner has left for a submission.

        Returns:
          The run that made them; 0 if there is nothing to continue from.
        """
        job, run = self.home.job(found.number), found.runs - 1
        results = job / RESULTS
        try:
            if not run or results.is_symlink() or not any(results.glob("*/study.db")):
                return 0
            state = pack_state(job)
            if state is None:
                return 0
            write_whole(job / "state.tar", state.data)
        except (AutomeshError, OSError):  # The search then begins anew.
            return 0
        row = {"number": found.number, "lease": "", "place": "", "run": run, "sequence": 0}
        with self.database.change() as connection:
            connection.execute(sa.delete(STATES).where(STATES.c.number == found.number))
            connection.execute(sa.insert(STATES).values(row))
        return run

    def _see(self, holder: str, offer: Offer, running: str = "") -> None:
        key, now_s = f"{holder}/{offer.name}", time.time()
        with self._lock:
            before = self.agents.pop(key, None)
            while len(self.agents) >= _MOST_AGENTS:
                del self.agents[next(iter(self.agents))]
            started_s = before.started_s if before is not None else now_s
            self.agents[key] = SeenAgent(
                offer=offer, running=running, started_s=started_s, seen_s=now_s
            )

    # An agent at work

    def beat(self, lease: str, holder: str) -> Beat:
        """Keeps a lease.

        Raises:
          Lapsed: the lease has ended, or belongs to another holder.
        """
        with self.database.read() as connection:
            row = _row(connection, lease, holder)
        submission = self.store.get(row.number, None)
        self._heard(row)
        return Beat(is_cancelled=submission.is_cancelled, log_bytes=_size(self._log(row.number)))

    def bundle(self, lease: str, holder: str) -> Path:
        """Returns the path of the bundle of a submission; raises as `beat`."""
        with self.database.read() as connection:
            row = _row(connection, lease, holder)
        self._heard(row)
        return self.home.bundle(self.store.get(row.number, None).digest)

    def add_log(self, lease: str, holder: str, offset: int, data: bytes) -> int:
        """Adds bytes to the log of a search, which begin at `offset` of the log. Bytes that the log
        already has are not added again; nothing is added beyond a gap, or beyond the bound of a
        log.

        Returns:
          How many bytes the log has now.

        Raises:
          Lapsed: as for `beat`.
          OSError: it cannot be written.
        """
        with self.database.change() as connection:  # One request after the other.
            row = _row(connection, lease, holder)
            path = self._log(row.number)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open_log(path) as log:
                size = os.fstat(log.fileno()).st_size
                if offset <= size < offset + len(data):
                    room = max(0, limits.SEARCH_LOG_BYTES - size)
                    log.write(data[size - offset :][:room])
                size = os.fstat(log.fileno()).st_size
        self._heard(row)
        return size

    def keep_state(self, lease: str, holder: str, sequence: int, draft: Path) -> None:
        """Keeps the results of a search so far: its studies and rules.

        Args:
          sequence: grows with each state that is sent with a lease.
          draft: a tar as `pack_state` makes it, which is moved away.

        Raises:
          Lapsed: as for `beat`.
          Replayed: a newer one has arrived before.
          BadBundle: it contains something that a state may not; nothing is kept.
          UsageError: it is not known now what its studies belong to; nothing is kept.
          OSError: it cannot be written.
        """
        with self.database.read() as connection:
            row = _row(connection, lease, holder)
        job = self.home.job(row.number)
        job.mkdir(mode=0o700, exist_ok=True)
        self._check_state(draft, job)
        self._heard(row)
        whole = Path(tempfile.mkdtemp(suffix=".draft", dir=job))
        try:
            unpack(draft, whole / "new")
            check_studies(whole / "new")
            with self.database.change() as connection:
                row = _row(connection, lease, holder)
                mine = STATES.c.number == row.number
                last = connection.execute(sa.select(STATES).where(mine)).one_or_none()
                if last is not None and last.lease == lease and last.sequence >= sequence:
                    raise Replayed("a state that is newer has come before")
                put_in_place(whole / "new", job, whole)
                move_whole(draft, job / "state.tar")
                values = {"number": row.number, "lease": lease, "sequence": sequence}
                values |= {"run": row.run, "place": row.place}
                connection.execute(sa.delete(STATES).where(mine))
                connection.execute(sa.insert(STATES).values(values))
        finally:
            shutil.rmtree(whole, ignore_errors=True)
        self._heard(row)

    def _check_state(self, draft: Path, job: Path) -> None:
        for study in check_state(draft):
            number = submission_in(study)
            # A study whose name contains a number belongs to that submission, whoever has used the
            # name. Former versions of an agent send names without a number: such a name is free
            # until something has it.
            if number != job.name and (number or self.is_foreign(study, job)):
                raise BadBundle(f"the study `{study}` belongs to something else")

    def state(self, lease: str, holder: str) -> Path:
        """Returns the path of the last state of a submission, as it was sent; raises as `beat`."""
        with self.database.read() as connection:
            row = _row(connection, lease, holder)
        self._heard(row)
        return self.home.job(row.number) / "state.tar"

    def end(
        self, lease: str, holder: str, code: int | None, *, said: str = "", is_meant: bool = False
    ) -> Submission:
        """Ends a lease with the exit code of the search; see `end_run`.

        Raises:
          Lapsed: as for `beat`.
        """
        with self.database.read() as connection:
            row = _row(connection, lease, holder)
        job = self.home.job(row.number)
        who = f"{row.holder}/{row.agent}"
        ended = end_run(
            self.store,
            row.number,
            code,
            job,
            is_meant=is_meant,
            said=said,
            lease=lease,
            note=self.audit.noting("end", lambda state: f"{state}, says {who}"),
        )
        self._forget(row)
        return ended

    def end_lost(self) -> list[Submission]:
        """Ends the leases of agents that have sent nothing for too long."""
        with self.database.read() as connection:
            rows = connection.execute(sa.select(LEASES)).all()
        ended: list[Submission] = []
        for row in rows:
            heard_s = self._heard_s.get(row.lease, self._since_s)
            if self.clock() - heard_s <= limits.LEASE_S:
                continue
            try:
                found = self._cut_lost(row)
            except Lapsed:
                continue  # The agent has just reported the end.
            self._forget(row)
            ended.append(found)
        return ended

    def _cut_lost(self, row: sa.Row[Any]) -> Submission:
        """Ends the lease of a lost agent; raises as `beat`."""
        who = f"{row.holder}/{row.agent}"
        note = self.audit.noting("end", lambda state: f"{who} is lost: {state}")
        return self.store.cut(row.number, is_meant=False, lease=row.lease, note=note)

    def _heard(self, row: sa.Row[Any]) -> None:
        self._heard_s[row.lease] = self.clock()
        seen = self.agents.get(f"{row.holder}/{row.agent}")
        if seen is not None:
            self._see(row.holder, seen.offer, row.number)

    def _forget(self, row: sa.Row[Any]) -> None:
        self._heard_s.pop(row.lease, None)
        key = f"{row.holder}/{row.agent}"
        with self._lock:
            if (seen := self.agents.get(key)) is not None and seen.running == row.number:
                self.agents[key] = replace(seen, running="")

    def _log(self, number: str) -> Path:
        return self.home.job(number) / "search.log"


def _row(connection: sa.Connection, lease: str, holder: str) -> sa.Row[Any]:
    query = sa.select(LEASES).where(LEASES.c.lease == lease, LEASES.c.holder == holder)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise Lapsed("the lease has ended: the submission is somebody else's now")
    return row


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
