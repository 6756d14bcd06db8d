"""What the processes that run one step do together, so that none of them decides by itself (jax).

On several processes every step has to be run by all, the same number of times: who warmed up for so
long by a clock of its own would leave the others waiting in a collective. The parent decides, which
speaks to all of them; a process by itself decides alone.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

from automesh.program.distributed import count_processes, meet
from automesh.program.execute.warm_up import steps_to_warm_up

Emit = Callable[[dict[str, Any]], dict[str, Any]]


class Team(Protocol):
    """The processes of one jax program, seen by one of them."""

    def gather(self, where: str) -> None:
        """Waits for all of them, however long they take: after a compile, after making arrays."""
        ...

    def align(self) -> None:
        """Waits on the devices for all of them, which come at about the same time."""
        ...

    def warm_up(self, sample: Callable[[int], float], least_s: float) -> None:
        """Runs at least one step, and for about so many seconds.

        Args:
          sample: runs so many steps, gives seconds per step.
        """
        ...

    def slowest(self, seconds: float) -> float:
        """What the slowest of them took, which is the same number in all."""
        ...


class Alone:
    """One process."""

    def gather(self, where: str) -> None:
        """See `Team`."""

    def align(self) -> None:
        """See `Team`."""

    def warm_up(self, sample: Callable[[int], float], least_s: float) -> None:
        """See `Team`."""
        end = perf_counter() + least_s
        while True:
            sample(1)
            if perf_counter() >= end:
                return

    def slowest(self, seconds: float) -> float:
        """See `Team`."""
        return seconds


class GangTeam:
    """Several processes.

    Args:
      emit: sends an event to the parent, which answers when all processes have sent theirs.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def gather(self, where: str) -> None:
        """See `Team`."""
        self._emit({"event": "gather", "where": where, "reply": True})

    def align(self) -> None:
        """See `Team`."""
        meet()

    def warm_up(self, sample: Callable[[int], float], least_s: float) -> None:
        """See `Team`."""
        self.align()
        for _ in range(steps_to_warm_up(self.slowest(sample(1)), least_s)):
            sample(1)

    def slowest(self, seconds: float) -> float:
        """See `Team`."""
        return float(self._emit({"event": "slowest", "seconds": seconds, "reply": True})["seconds"])


def team_of(emit: Emit) -> Team:
    """The processes of this jax program."""
    return GangTeam(emit) if count_processes() > 1 else Alone()
