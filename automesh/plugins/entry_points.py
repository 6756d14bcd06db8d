"""Finds plug-ins by their entry points, and loads one: a missing or a broken one gives a sentence.

Nothing is looked for, and no plug-in is imported, before somebody asks for a name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from automesh.errors import AutomeshError, NotInstalled, UsageError
from automesh.plugins.offered import who_offers


@functools.cache
def installed(group: str) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Returns the entry points of a group, by name; several of one name are of several
    distributions."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=group):
        others = found.get(point.name, ())
        if point.value not in [one.value for one in others]:
            found[point.name] = (*others, point)
    return found


def load(group: str, name: str, kind: type | tuple[type, ...] = object, *, what: str = "") -> Any:
    """Loads the object that a plug-in adds to a group under a name.

    Args:
      kind: the type that it must have, if a type can be checked.
      what: how a message begins if no plug-in has it: "`automesh serve`"; by default its name.

    Raises:
      NotInstalled: no plug-in has it.
      UsageError: several have it, or the one that has it cannot be loaded.
    """
    points = list(installed(group).get(name, ()))
    if not points:
        known = who_offers(group, name)
        # In one sentence: of what fails in a worker, only the message reaches the user.
        install = known.install if known else f"install what adds it to the group `{group}`"
        said = what or f"`{name}`"
        raise NotInstalled(f"{said} is in a plug-in that is not installed: {install}")
    if len(points) > 1:
        owners = " and ".join(sorted(map(_owner, points)))
        raise UsageError(
            f"`{name}` of the group `{group}` is added by several plug-ins, {owners}",
            hint="uninstall all but one of them",
        )
    point = points[0]
    try:
        found = point.load()
    except AutomeshError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise _broken(point, f"cannot be loaded: {type(error).__name__}: {said}") from error
    if not isinstance(found, kind):
        raise _broken(point, f"is made for another version of automesh: `{point.value}`")
    return found


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _broken(point: EntryPoint, why: str) -> UsageError:
    owner = _owner(point)
    return UsageError(
        f"`{point.name}` is in the plug-in {owner}, which {why}",
        hint=f"install it again: pip install --force-reinstall {owner}",
    )
