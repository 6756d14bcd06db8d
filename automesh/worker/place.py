"""The place of a worker in a gang of processes that run as one jax program (no jax)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PLACE = "AUTOMESH_GANG"
"""Variable of a worker: its place, as `Place.text` writes it; absent for a process by itself."""
_PLACE = re.compile(r"(?P<rank>\d+)/(?P<count>\d+)@(?P<coordinator>\S+)(?: (?P<host>\S+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which process of how many a worker is, and where they meet.

    Attributes:
      rank: jax's process index.
      count: processes of the gang.
      coordinator: `address:port` at which the process of rank 0 serves jax's coordination service.
      host: address at which the others reach this process's host; empty if nobody says it.
    """

    rank: int
    count: int
    coordinator: str
    host: str = ""

    @property
    def text(self) -> str:
        """For the variable `PLACE`.

        >>> Place(rank=1, count=2, coordinator="10.0.0.1:41234", host="10.0.0.2").text
        '1/2@10.0.0.1:41234 10.0.0.2'
        """
        return f"{self.rank}/{self.count}@{self.coordinator} {self.host}".rstrip()


def place_in(environ: Mapping[str, str]) -> Place | None:
    """The place that a worker was started for; None for a process by itself."""
    found = _PLACE.fullmatch(environ.get(PLACE, ""))
    if found is None:
        return None
    return Place(
        rank=int(found["rank"]),
        count=int(found["count"]),
        coordinator=found["coordinator"],
        host=found["host"] or "",
    )
