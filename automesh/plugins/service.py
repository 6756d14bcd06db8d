"""The interface of the plug-in for services, in the group `automesh.services`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from automesh.plugins.entry_points import load
from automesh.plugins.offered import SERVICES

if TYPE_CHECKING:
    from automesh.mesh.config import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A search that a user asks of a service.

    Attributes:
      script: its file, or what stands for one.
      args: of the script.
      options: values of those options of `automesh search` that a service carries, by name
        (`has_server` in `automesh.options.table`).
    """

    script: str
    args: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAgent:
    """An agent that a user starts for a service, as options say it.

    Attributes:
      server: address of the service.
      name: of this host; empty for its own.
      takes: patterns of the targets to search for.
      has: what this host has, for submissions that need it.
      folder: for bundles and studies.
    """

    server: str
    name: str
    takes: tuple[str, ...]
    has: tuple[str, ...]
    folder: Path


class Service(Protocol):
    """The interface of what speaks to a service of automesh."""

    def submit_and_follow(self, asked: Asked) -> None:
        """Lets the service search, prints what it finds and merges its rule.

        Raises:
          NoFeasibleMesh: nothing may become a rule.
          UsageError: an option is wrong, nobody answers, or the search was refused or cancelled.
        """
        ...

    def serve_agent(self, asked: AskedAgent) -> None:
        """Runs what has been submitted to a service, until Ctrl-C.

        Raises:
          UsageError: an option is wrong, or the service does not take the token.
        """
        ...

    def load_rules(self, url: str) -> Rules:
        """Returns the rules under a URL of a service.

        Raises:
          UsageError: it does not answer, does not take the token, or sends no rules.
        """
        ...


def find_service(what: str) -> Service:
    """Returns the installed plug-in that speaks to services.

    Args:
      what: the command or function that needs it, for the error: "`automesh search --server`".

    Raises:
      UsageError: there is none, or it cannot be loaded.
    """
    found: Service = load(SERVICES, "service", what=what)
    return found
