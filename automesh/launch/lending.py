"""Compiles on every host of a search: workers that are single processes under its agents.

A pool starts and ends them in the same way as processes on its own host. This module picks the host
with the most free cores and memory. The search picks the job, so that each program is compiled once
in the whole cluster (`automesh.tuner.compile.rung`). When an agent is lost, other agents get its
jobs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from automesh.launch.facts import HostFacts
from automesh.launch.fleet import Fleet
from automesh.launch.gang import Gang
from automesh.worker.messages import Surroundings

QUICK_FAILURES = 3
"""Number of processes in a row that must fail to start before their host is no longer used."""


class Lender:
    """Starts workers on the hosts of a search that have room for them.

    Args:
      fleet: the connected agents.
      needed_bytes: memory that one worker needs; decides how many a host has room for.
      notice: is called in the thread of the pool when a host is no longer used.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        needed_bytes: int,
        notice: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._fleet = fleet
        self._needed_bytes = needed_bytes
        self._notice = notice
        self._lock = threading.Lock()
        self._running: dict[Gang, tuple[int, str]] = {}
        self._quick: Counter[str] = Counter()
        self._aside: set[str] = set()

    def room(self) -> int:
        """Returns how many workers may run now on all hosts together."""
        self._fleet.restart_lost()
        return sum(self._rooms().values())

    def start_worker(
        self, *, surroundings: Surroundings, log: Path, memory_limit_bytes: int, handler: str
    ) -> Gang:
        """Starts a worker on the host with the most room; see
        `automesh.worker.process.StartWorker`.

        Args:
          memory_limit_bytes: not used: it is the free memory of the search's own host.

        Raises:
          OSError: no host is left.
        """
        del memory_limit_bytes
        rooms = self._rooms()
        if not rooms:
            raise OSError("no host is left to compile on")
        names = {number: facts.name for number, facts in self._fleet.present}
        with self._lock:
            taken = Counter(number for number, _ in self._running.values())
            number = max(
                rooms,
                key=lambda one: (
                    -self._quick[names.get(one, "")],
                    (rooms[one] - taken[one]) / rooms[one],
                    -one,
                ),
            )
            gang = Gang(log, on_end=self._release)
            self._running[gang] = (number, names.get(number, ""))
        try:
            self._fleet.start_process(number, gang, surroundings, handler, share=rooms[number])
        except OSError:
            with self._lock:
                del self._running[gang]
            raise
        return gang

    def load(self) -> dict[int, int]:
        """Returns the number of running workers, by the number of their agent."""
        with self._lock:
            return dict(Counter(number for number, _ in self._running.values()))

    def _rooms(self) -> dict[int, int]:
        """Returns how many workers each host has room for, by the number of its agent."""
        present = self._fleet.present
        beside = Counter(facts.machine for _, facts in present)
        return {
            number: max(self._room_of(facts) // beside[facts.machine], 1)
            for number, facts in present
            if facts.name not in self._aside
        }

    def _room_of(self, facts: HostFacts) -> int:
        return min(facts.cores, int(facts.memory_bytes // self._needed_bytes))

    def _release(self, gang: Gang) -> None:
        with self._lock:
            _, host = self._running.pop(gang, (0, ""))
            why = gang.lost_at_start
            if gang.served:
                self._quick[host] = 0
            elif why:
                self._quick[host] += 1
            is_bad = self._quick[host] >= QUICK_FAILURES and host not in self._aside
            if is_bad:
                self._aside.add(host)
        if is_bad:
            self._notice(
                f"{host} is not used any more: {QUICK_FAILURES} processes in a row failed to start "
                f"there ({why})"
            )
