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


class Gang:
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
        step_s = sample(1)
        reply = self._emit({"event": "warm", "step_s": step_s, "least_s": least_s, "reply": True})
        for _ in range(int(reply["steps"])):
            sample(1)


def team_of(emit: Emit) -> Team:
    """The processes of this jax program."""
    return Gang(emit) if count_processes() > 1 else Alone()
