"""Finds the mesh axes that a collective spans.

Device ids of a collective are logical partition ids: indices into `mesh.devices.flat`, whose shape
is the axes' sizes in order.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from automesh.hlo.nouns import Groups

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpan:
    """The mesh axes that one collective spans.

    Attributes:
      axes: in the order of the mesh; a part of an axis counts as the axis; empty if the groups are
        not boxes of mesh coordinates, or differ in their axes.
      group_size: devices of the largest group.
    """

    axes: tuple[str, ...]
    group_size: int


@lru_cache(maxsize=4096)
def span_of_groups(groups: Groups, axes: Axes) -> CollectiveSpan:
    """Finds the axes along which the devices of each group differ.

    Args:
      groups: device ids; empty means one group of all devices.
      axes: names and sizes, in the order of the mesh.

    Raises:
      ValueError: a device id is outside the mesh.

    >>> span_of_groups(((0, 1), (2, 3), (4, 5), (6, 7)), (("dp", 2), ("tp", 4)))
    CollectiveSpan(axes=('tp',), group_size=2)
    """
    groups = groups or (tuple(range(math.prod(size for _, size in axes))),)
    largest = max(len(group) for group in groups)
    found = {_axes_of_box(group, axes) for group in groups if len(group) > 1}
    return CollectiveSpan(axes=found.pop() if len(found) == 1 else (), group_size=largest)


@lru_cache(maxsize=4096)
def span_of_pairs(pairs: tuple[tuple[int, int], ...], axes: Axes) -> CollectiveSpan:
    """Finds the axes along which sources and targets differ; a group is a ring or chain of pairs.

    Raises:
      ValueError: a device id is outside the mesh.

    >>> span_of_pairs(((0, 1), (1, 0), (2, 3), (3, 2)), (("dp", 2), ("tp", 2)))
    CollectiveSpan(axes=('tp',), group_size=2)
    """
    differing: set[int] = set()
    leaders: dict[int, int] = {}

    def leader(device: int) -> int:
        while leaders.setdefault(device, device) != device:
            device = leaders[device]
        return device

    for source, target in pairs:
        here, there = _coordinates(source, axes), _coordinates(target, axes)
        differing |= {axis for axis in range(len(axes)) if here[axis] != there[axis]}
        leaders[leader(source)] = leader(target)
    sizes = Counter(leader(device) for device in list(leaders))
    return CollectiveSpan(
        axes=tuple(name for axis, (name, _) in enumerate(axes) if axis in differing),
        group_size=max(sizes.values(), default=1),
    )


def _axes_of_box(group: tuple[int, ...], axes: Axes) -> tuple[str, ...]:
    coordinates = [_coordinates(device, axes) for device in group]
    extents = [len(set(along)) for along in zip(*coordinates)]
    if math.prod(extents) != len(group):
        return ()
    return tuple(name for (name, _), extent in zip(axes, extents) if extent > 1)


def _coordinates(device: int, axes: Axes) -> tuple[int, ...]:
    rest, result = device, []
    for _, size in reversed(axes):
        rest, coordinate = divmod(rest, size)
        result.append(coordinate)
    if rest:
        raise ValueError(f"device {device} is outside the mesh {dict(axes)}")
    return tuple(reversed(result))
