"""Lists the ways to try a cure (no jax).

One of them changes the sharding of an array one mesh axis at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from automesh.cost.terms import Cure

Split = tuple[tuple[str, ...], ...]
_MOST_PATHS = 4
_MOST_HOPS = 4


def variants(cure: Cure) -> Iterator[Cure]:
    """Lists the variants of a cure that are worth a try.

    State that comes back with another sharding can be returned as it was given, or be given as it
    comes back, if that is not whole on every device; and several sequences of moves may lead from
    one sharding to another.
    """
    if cure.kind != "hops":
        yield cure
    if cure.kind == "return-as-given" and all(any(split) for split in cure.splits):
        yield replace(cure, kind="split-like")
    if cure.kind == "hops":
        before, after = cure.splits
        for between in paths(before, after):
            yield replace(cure, splits=(before, *between, after))


def paths(before: Split, after: Split) -> tuple[tuple[Split, ...], ...]:
    """Finds the shortest sequences of moves: each an all-to-all, gather or slice over one axis.

    Returns:
      For each sequence the shardings in between; none if one move is enough, or too many are
      needed.

    >>> paths((("tp",), (), ("dp",)), ((), ("dp", "tp"), ()))
    (((('tp',), ('dp',), ()),),)
    """
    wanted = {axis for one in after for axis in one}
    found: list[tuple[Split, ...]] = []
    waiting: deque[tuple[Split, ...]] = deque([(before,)])
    seen: dict[Split, int] = {before: 0}
    while waiting and len(found) < _MOST_PATHS:
        path = waiting.popleft()
        if found and len(path) > len(found[0]) + 2:
            break
        if path[-1] == after:
            found.append(path[1:-1])
            continue
        if len(path) > _MOST_HOPS:
            continue
        for following in _moves(path[-1], wanted):
            if seen.setdefault(following, len(path)) >= len(path):
                waiting.append((*path, following))
    return tuple(path for path in found if path)


def _moves(split: Split, wanted: set[str]) -> Iterator[Split]:
    """Lists single moves: the last axis of a dimension moves or goes, or one is added."""
    used = {axis for one in split for axis in one}
    for source, axes in enumerate(split):
        if not axes:
            continue
        left = _with(split, source, axes[:-1])
        for target in range(len(split)):
            if target != source:
                yield _with(left, target, (*split[target], axes[-1]))
        yield left
    for axis in sorted(wanted - used):
        for target, axes in enumerate(split):
            yield _with(split, target, (*axes, axis))


def _with(split: Split, dimension: int, axes: tuple[str, ...]) -> Split:
    return (*split[:dimension], axes, *split[dimension + 1 :])
