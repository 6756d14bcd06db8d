"""Measures for how long things of a service have not changed, by a clock that nobody can set.

The time of day may jump by a day; things that are kept for an hour would then be removed at once.
So a thing is old only if earlier checks have seen it unchanged, and the time between the checks is
measured by the kernel's clock since its boot, which goes on while the service is down. The time of
day counts only between two boots. The counts are in the database, so a restarted service continues
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from automesh_service.submissions.database import ELAPSED, SEEN, Database

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def since_boot_s() -> float:
    """Returns the seconds since the boot of this host, including those in which it slept if the
    system counts them."""
    if (of_boot := getattr(time, "CLOCK_BOOTTIME", None)) is not None:
        return time.clock_gettime(of_boot)
    return time.monotonic()


def boot_id() -> str:
    """Returns an id of this boot of the host; empty where the system has none."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elapsed:
    """Counts for how long things have been as they are.

    Attributes:
      steady: returns the seconds since the boot.
      boot: the id of this boot.
      clock: returns the time of day, in seconds since 1970.
    """

    database: Database
    steady: Callable[[], float] = since_boot_s
    boot: Callable[[], str] = boot_id
    clock: Callable[[], float] = time.time

    def unchanged(self, kind: str, stamps: Mapping[str, float], age_s: float) -> set[str]:
        """Returns which things of a kind have had the same stamp for at least `age_s`.

        Args:
          kind: the kind of the things; other kinds are ignored.
          stamps: a text for each thing that exists now, which changes whenever the thing changes.
            Things that are missing here are forgotten.
          age_s: seconds since an earlier call first saw this stamp.
        """
        with self.database.change() as connection:
            now_s = self._now_s(connection)
            rows = connection.execute(sa.select(SEEN).where(SEEN.c.kind == kind)).all()
            seen = {row.name: row.at_s for row in rows if stamps.get(row.name) == row.stamp}
            gone = [row.name for row in rows if row.name not in seen]
            for name in gone:
                mine = sa.and_(SEEN.c.kind == kind, SEEN.c.name == name)
                connection.execute(sa.delete(SEEN).where(mine))
            new = [
                {"kind": kind, "name": name, "stamp": stamp, "at_s": now_s}
                for name, stamp in stamps.items()
                if name not in seen
            ]
            if new:
                connection.execute(sa.insert(SEEN), new)
        return {name for name, at_s in seen.items() if now_s - at_s >= age_s}

    def _now_s(self, connection: sa.Connection) -> float:
        """Returns the seconds since the first call of all, and stores them."""
        boot, steady_s, day_s = self.boot(), self.steady(), self.clock()
        last = connection.execute(sa.select(ELAPSED)).one_or_none()
        now_s = 0.0
        if last is not None:
            is_same = last.boot == boot and steady_s >= last.steady_s
            passed_s = steady_s - last.steady_s if is_same else max(day_s - last.day_s, 0.0)
            now_s = last.elapsed_s + passed_s
        row = {"boot": boot, "steady_s": steady_s, "day_s": day_s, "elapsed_s": now_s}
        connection.execute(sa.insert(ELAPSED).prefix_with("OR REPLACE").values(number=0, **row))
        return now_s
