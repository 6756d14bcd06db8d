"""Frameworks whose own training step can be searched, in the group `automesh.frameworks`."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.plugins.entry_points import installed, load
from automesh.plugins.offered import FRAMEWORKS, offered


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework whose own training step can be searched: `automesh search NAME -- ARGUMENTS`.

    Attributes:
      name: what the user calls it.
      title: how it writes its own name.
      package: what Python imports.
      install: what to do where it is missing.
      module: its adapter, with a function `build`; only workers import it.
      former_module: the adapter's module in former versions, whose studies can be continued.
      space: search space that is taken if no other is named.
      seen_in: the package and the version with which the adapter was tried.
      example: arguments that a user may start from.
    """

    name: str
    title: str
    package: str
    install: str
    module: str
    space: str
    seen_in: str
    example: str
    former_module: str = ""


def is_framework(name: str) -> bool:
    """Whether `automesh search NAME` means a framework, installed or not."""
    return name in offered(FRAMEWORKS) or name in installed(FRAMEWORKS)


def framework_called(name: str) -> Framework:
    """Returns the framework of a name.

    Raises:
      UsageError: its plug-in is not installed, or cannot be loaded.
    """
    found: Framework = load(FRAMEWORKS, name, Framework, what=f"`automesh search {name}`")
    return found


def framework_at(module: str) -> Framework | None:
    """Returns the framework whose adapter a module is; None if it is code of the user's own.

    Only plug-ins that have a module of this package are loaded.

    Raises:
      UsageError: such a plug-in cannot be loaded.
    """
    package = module.partition(".")[0]
    of_package = [
        name
        for name, points in installed(FRAMEWORKS).items()
        if any(point.module.partition(".")[0] == package for point in points)
    ]
    found = map(framework_called, of_package)
    return next((one for one in found if one.module == module), None)
