"""The names that the plug-ins of this repository add: for help texts, and to say what to install.

This is all that the core knows of them. A plug-in of somebody else needs no place here: its entry
points are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COMMANDS = "automesh.commands"
SERVICES = "automesh.services"
FRAMEWORKS = "automesh.frameworks"
EXPORTS = "automesh.exports"
PIPELINES = "automesh.pipelines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A plug-in as it is installed.

    Attributes:
      name: of the package for pip.
      folder: in a clone of automesh.
      names: the names that it adds to each group of entry points.
    """

    name: str
    folder: str
    names: Mapping[str, tuple[str, ...]]

    @property
    def install(self) -> str:
        """The command that installs it, as a hint for the user."""
        return f"pip install {self.name} (in a clone: pip install -e {self.folder})"


SERVICE = Distribution(
    name="jax-automesh-service",
    folder="plugins/service",
    names={COMMANDS: ("serve", "submit", "token"), SERVICES: ("service",)},
)
FRAMEWORK_STEPS = Distribution(
    name="jax-automesh-frameworks",
    folder="plugins/frameworks",
    names={
        FRAMEWORKS: ("maxtext", "levanter", "easydel", "tunix", "kauldron", "axlearn"),
        EXPORTS: ("maxtext", "axlearn", "levanter", "easydel", "tunix", "loadax"),
    },
)
PIPELINE_RUNTIME = Distribution(
    name="jax-automesh-pipeline",
    folder="plugins/pipeline",
    names={PIPELINES: ("runtime",)},
)
DISTRIBUTIONS = (SERVICE, FRAMEWORK_STEPS, PIPELINE_RUNTIME)
SHORT_HELPS = {
    "serve": "Serve studies and take searches over HTTP.",
    "submit": "Let a service search, and take its rule home.",
    "token": "Say who may do what with a service.",
}
"""The lines of `automesh --help`, which lists a command whether or not its plug-in is installed."""


def offered(group: str) -> tuple[str, ...]:
    """Returns the names in a group of entry points that plug-ins of this repository add.

    >>> offered("automesh.commands")
    ('serve', 'submit', 'token')
    """
    return tuple(name for one in DISTRIBUTIONS for name in one.names.get(group, ()))


def who_offers(group: str, name: str) -> Distribution | None:
    """Returns the plug-in of this repository that adds a name to a group; None for a name of
    others."""
    return next((one for one in DISTRIBUTIONS if name in one.names.get(group, ())), None)
