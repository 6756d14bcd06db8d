"""The interface of launchers, which start and end agents (no jax)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """The agents that a launcher shall start.

    Attributes:
      search: `address:port` that agents dial.
      token: goes into the environment of the agents, never into their arguments.
      hosts: how many agents.
      ca: file on all hosts with the certificates that agents trust; empty for no encryption.
    """

    search: str
    token: str
    hosts: int
    ca: str = ""


class Launcher(Protocol):
    """An engine of a cluster that starts the agents of a search, one for each host.

    The engine chooses the hosts and cancels the agents; automesh schedules nothing.
    """

    @property
    def name(self) -> str:
        """The name of the launcher on the command line."""
        ...

    def start(self, order: AgentOrder) -> None:
        """Starts the agents; returns before they have connected.

        Raises:
          UsageError: the engine is not installed, or refuses.
        """
        ...

    def refill(self) -> bool:
        """Restarts agents that have ended.

        Returns:
          False if this launcher restarts nothing: the engine does it by itself, or nobody does.
        """
        ...

    def give_up(self, name: str) -> None:
        """Ends an agent that hangs, for instance because a signal stopped it; from any thread.

        While it exists, `refill` cannot start another one.

        Args:
          name: name of its host, as the agent reported it.
        """
        ...

    def trouble(self) -> str:
        """Returns why agents may not start, as far as the engine reports; empty if it reports
        nothing."""
        ...

    def close(self) -> None:
        """Ends all agents and waits until they have ended."""
        ...


def agent_command(order: AgentOrder, *, wait_s: float, name: str = "") -> list[str]:
    """Returns the command that runs an agent with the Python of this process, without the token.

    Args:
      wait_s: how long the agent tries to reach the search.
      name: name for its host; empty for the host's own name.
    """
    # -P: Python must not import an `automesh.py` from the folder of the user's script instead.
    command = [sys.executable, "-P", "-m", "automesh", "agent", order.search]
    command += ["--name", name] if name else []
    command += ["--ca", order.ca] if order.ca else []
    return [*command, "--wait", f"{wait_s:.0f}s"]
