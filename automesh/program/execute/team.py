"""Coordinates the processes that run one step, so that all make the same decisions (jax).

All processes must run each step the same number of times: a process that warms up by its own clock
would leave the others waiting in a collective. So the parent, which communicates with all of them,
decides; a single process decides alone.
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
        """Waits until all processes have reached this call, for as long as it takes. Called after a
        compile, and after the arrays are made."""
        ...

    def align(self) -> None:
        """Waits on the devices for all processes, which must arrive at about the same time."""
        ...

    def warm_up(self, sample: Callable[[int], float], least_s: float) -> None:
        """Runs at least one step, and steps for about `least_s` seconds.

        Args:
          sample: runs a number of steps and returns the seconds per step.
        """
        ...

    def slowest(self, seconds: float) -> float:
        """Returns the time of the slowest process, which all processes get."""
        ...


class Alone:
    """A single process, which decides alone."""

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
    """Several processes, for which the parent decides.

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
    """Makes the team of the processes of this jax program."""
    return GangTeam(emit) if count_processes() > 1 else Alone()
