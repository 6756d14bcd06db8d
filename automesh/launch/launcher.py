"""What a launcher does: it starts agents, and ends them (no jax)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be started.

    Attributes:
      search: `address:port` that agents dial.
      token: for the environment of the agents, never for their arguments.
      hosts: how many agents.
      ca: file, on all hosts, with what they trust; empty for a channel without certificates.
    """

    search: str
    token: str
    hosts: int
    ca: str = ""


class Launcher(Protocol):
    """An engine of a cluster that starts the agents of a search, one for each host.

    The engine places and cancels; nothing here schedules.
    """

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    def start(self, order: Order) -> None:
        """Starts agents; returns before they have come.

        Raises:
          UsageError: the engine is not here, or refuses.
        """
        ...

    def refill(self) -> bool:
        """Starts those agents again that have ended.

        Returns:
          False if the engine does that by itself, or nobody does.
        """
        ...

    def give_up(self, name: str) -> None:
        """Ends an agent that hangs, for instance stopped by a signal; from any thread.

        While it is there, `refill` has no place for another one.

        Args:
          name: of its host, as the agent says it.
        """
        ...

    def trouble(self) -> str:
        """Why agents may not come, as far as the engine says; empty if it says nothing."""
        ...

    def close(self) -> None:
        """Ends all agents, and waits for it."""
        ...


def agent_command(order: Order, *, wait_s: float, name: str = "") -> list[str]:
    """The command of an agent, with the Python of this process; the token is not in it.

    Args:
      wait_s: for the search, which listens already.
      name: of its host; empty for its own.
    """
    # -P: an `automesh.py` in the folder of the user's script must not take its place.
    command = [sys.executable, "-P", "-m", "automesh", "agent", order.search]
    command += ["--name", name] if name else []
    command += ["--ca", order.ca] if order.ca else []
    return [*command, "--wait", f"{wait_s:.0f}s"]
