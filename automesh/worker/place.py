"""The place of a worker in a gang of processes that run as one jax program (no jax)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

PLACE = "AUTOMESH_GANG"
"""The environment variable with a worker's place in its gang, as `GangPlace.text` writes it; it is
not set for a worker that is a single process."""
_PLACE = re.compile(r"(?P<rank>\d+)/(?P<count>\d+)@(?P<coordinator>\S+)(?: (?P<host>\S+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPlace:
    """The number of a worker in its gang, and the address at which the gang's processes connect.

    Attributes:
      rank: jax's process index.
      count: processes of the gang.
      coordinator: `address:port` of jax's coordination service in the process of rank 0.
      host: address at which the other processes reach this one's host; empty if unknown.
    """

    rank: int
    count: int
    coordinator: str
    host: str = ""

    @property
    def text(self) -> str:
        """The value of the variable `PLACE`.

        >>> GangPlace(rank=1, count=2, coordinator="10.0.0.1:41234", host="10.0.0.2").text
        '1/2@10.0.0.1:41234 10.0.0.2'
        """
        return f"{self.rank}/{self.count}@{self.coordinator} {self.host}".rstrip()


def place_in(environ: Mapping[str, str]) -> GangPlace | None:
    """Reads the place of a worker from its environment; None for a single process."""
    found = _PLACE.fullmatch(environ.get(PLACE, ""))
    if found is None:
        return None
    return GangPlace(
        rank=int(found["rank"]),
        count=int(found["count"]),
        coordinator=found["coordinator"],
        host=found["host"] or "",
    )
