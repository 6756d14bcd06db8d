"""Leases, which say who works on what, and end when their owner dies or falls silent."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Protocol

import psutil

LEASE_S = 30.0
"""A hold that was not renewed for this long may be taken over."""

GRACE_S = 10.0
"""How long a process waits for a renewal of a hold that looks too old when the process first sees
it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One opened study in one process.

    Attributes:
      host: the host's name, for people.
      machine: hash of the host's name, boot and pid namespace; pids compare only where it is equal.
      pid: process id.
      start: when the process started, in a form that only compares for equality: pids are reused.
      token: tells two studies opened in one process apart.
    """

    host: str
    machine: str
    pid: int
    start: str
    token: str


def this_owner() -> Owner:
    """Makes a new owner for this process."""
    pid = os.getpid()
    return Owner(
        host=socket.gethostname(),
        machine=_machine(),
        pid=pid,
        start=_process_start(pid),
        token=uuid.uuid4().hex[:12],
    )


def is_dead(owner: Owner) -> bool:
    """Whether an owner has surely ended: its process ran here, and is gone or a zombie."""
    return owner.machine == _machine() and _process_start(owner.pid) != owner.start


def _machine() -> str:
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if boot.exists():
        # Two containers may share a name; a pid says nothing outside of its own namespace and boot.
        parts += [boot.read_text().strip(), str(namespace.readlink())]
    else:
        parts.append(platform.platform())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _process_start(pid: int) -> str:
    """Returns when a process started; empty if there is no such process or it is a zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return ""
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():
            # Ticks since boot (field 22): psutil's create_time moves when the clock is set.
            return stat.read_text().rpartition(")")[2].split()[19]
        return str(process.create_time())
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return ""
    except (ValueError, OverflowError):  # No number that a process can have.
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """A row of the table: `owner` has `key`, and last said so at `renewed_s` of the shared clock.

    `version` grows with every change and is what a compare-and-set compares.
    """

    key: str
    owner: Owner
    renewed_s: float
    version: int


class LeaseTable(Protocol):
    """A small shared table of leases; every change is one atomic compare-and-set."""

    @property
    def seen(self) -> Sightings:
        """The leases that this process has seen in the table."""
        ...

    def now(self) -> float:
        """Returns the seconds of a clock that all hosts share: that of the storage."""
        ...

    def get(self, key: str) -> LeaseRow | None: ...

    def under(self, prefix: str) -> dict[str, LeaseRow]:
        """Lists the leases whose key starts with `prefix`."""
        ...

    def swap(self, key: str, old: LeaseRow | None, owner: Owner | None) -> bool:
        """Gives `key` to `owner` (None: to nobody) if its row is still `old`; returns whether it
        was."""
        ...

    def renew(self, owner: Owner) -> None:
        """Restarts the clock of all leases that `owner` still has."""
        ...

    def close(self) -> None: ...


class Sightings:
    """The leases that this process has seen, and since when they have not changed.

    Only the time that passes on this process's own clock ends a hold: the storage's clock may be
    set forward or back while the owner is alive. The storage's clock only shortens the wait for an
    owner that fell silent before this process began.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, Owner, float]] = {}

    def expired(self, row: LeaseRow, now_s: float) -> bool:
        """Whether anyone may take a hold over: its process is dead, or was silent for `LEASE_S`.

        Args:
          now_s: by the storage's clock.
        """
        if is_dead(row.owner):
            return True
        silent_s = self._unchanged_s(row)
        looks_old = now_s - row.renewed_s > LEASE_S
        return silent_s > (min(GRACE_S, LEASE_S) if looks_old else LEASE_S)

    def _unchanged_s(self, row: LeaseRow) -> float:
        version, owner, since_s = self._seen.get(row.key, (row.version, row.owner, 0.0))
        if row.key not in self._seen or (version, owner) != (row.version, row.owner):
            since_s = monotonic()
            self._seen[row.key] = (row.version, row.owner, since_s)
        return monotonic() - since_s


def take(leases: LeaseTable, key: str, owner: Owner) -> bool:
    """Takes `key` if nobody has it or its owner is gone; returns whether `owner` has it now."""
    row = leases.get(key)
    if row is not None and row.owner != owner and not leases.seen.expired(row, leases.now()):
        return False
    return leases.swap(key, row, owner)


def release(leases: LeaseTable, key: str, owner: Owner) -> None:
    """Gives `key` back; does nothing if somebody else has it by now."""
    # Again if a renewal came in between.
    while (row := leases.get(key)) is not None and row.owner == owner:
        if leases.swap(key, row, None):
            return


class StudyLease:
    """The right to enqueue and to measure in one study: at most one process has it.

    It ends `LEASE_S` after the last `renew`, or at once when its process is found dead.
    """

    def __init__(self, leases: LeaseTable, key: str, owner: Owner) -> None:
        self._leases = leases
        self._key = key
        self._owner = owner

    def acquire(self) -> bool:
        """Takes the lease if it is free or expired; returns whether this process has it now."""
        return take(self._leases, self._key, self._owner)

    def held(self) -> bool:
        """Whether this process has the lease, by the storage."""
        row = self._leases.get(self._key)
        return row is not None and row.owner == self._owner

    def renew(self) -> bool:
        """Keeps the lease and all claims of this process alive; call it every few seconds.

        Returns:
          Whether the lease is still this process's: False once another has taken it over.
        """
        self._leases.renew(self._owner)
        return self.held()

    def holder(self) -> Owner | None:
        """Returns who has the lease; None if nobody has it, or an owner that is gone."""
        row = self._leases.get(self._key)
        return None if row is None or self._is_over(row) else row.owner

    def _is_over(self, row: LeaseRow) -> bool:
        return self._leases.seen.expired(row, self._leases.now())

    def release(self) -> None:
        release(self._leases, self._key, self._owner)
