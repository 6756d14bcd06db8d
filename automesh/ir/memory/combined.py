"""Merges the all-reduces of a block that a compiler combines into one, for the memory of a step.

A combined all-reduce waits until the last of its operands is there, and makes all of its results at
once: the gradients of all layers live together, before and after it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from automesh.ir.graph import Value, used_in
from automesh.ir.memory.order import Step

_Key = tuple[str, ...]


def with_combined_reductions(
    steps: Sequence[Step], *, most_bytes: float = math.inf, sizes: Mapping[str, int] | None = None
) -> list[Step]:
    """Merges all-reduces over the same axes that do not need each other.

    The result is in an order that makes every value before it is read: the given order, except that
    operations may wait for a merged all-reduce.

    Args:
      most_bytes: limit for the operands of one merged all-reduce.
      sizes: axis sizes at which the operands are compared with the limit.
    """
    reductions = {step: _axes(step) for step in steps if step.name == "all_reduce"}
    if len(reductions) < 2:
        return list(steps)
    groups = _Groups(most_bytes, sizes or {})
    # Two groups over different axes may need each other, if levels count the same axes alone.
    for counts_all in (False, True):
        levels = _levels(steps, reductions, counts_all=counts_all)
        ordered = _ordered(_merged(groups.of(reductions, levels), steps, reductions))
        if ordered:
            return ordered
    return list(steps)


def _axes(step: Step) -> _Key:
    return tuple(step.operation.attributes.get("axes", ()))


def _levels(
    steps: Sequence[Step], reductions: Mapping[Step, _Key], *, counts_all: bool
) -> dict[Step, int]:
    """Counts, for each all-reduce, those in the longest chain of all-reduces that it depends on.

    Args:
      counts_all: whether those over other axes count, too.
    """
    found: dict[Step, int] = {}
    for key in dict.fromkeys(reductions.values()):
        behind: dict[Value, int] = {}
        for step in steps:
            needed = (*step.operands, *used_in(step.bodies)) if step.bodies else step.operands
            level = max((behind.get(value, 0) for value in needed), default=0)
            own = reductions.get(step)
            if own == key:
                found[step] = level
            if own is not None and (counts_all or own == key):
                level += 1
            if level:
                behind.update(dict.fromkeys(step.results, level))
    return found


class _Groups:
    """All-reduces that become one, up to a limit."""

    def __init__(self, most_bytes: float, sizes: Mapping[str, int]) -> None:
        self._most_bytes, self._sizes = most_bytes, sizes

    def of(self, reductions: Mapping[Step, _Key], levels: Mapping[Step, int]) -> list[list[Step]]:
        """Returns the groups, each in the order of its all-reduces."""
        found: list[list[Step]] = []
        open_groups: dict[tuple[_Key, int], tuple[list[Step], float]] = {}
        for step, axes in reductions.items():
            needed = sum(value.bytes.at(self._sizes) for value in step.operands)
            group, filled = open_groups.get((axes, levels[step]), ([], -1.0))
            if filled < 0 or filled + needed > self._most_bytes:
                group, filled = [], 0.0
                found.append(group)
            group.append(step)
            open_groups[axes, levels[step]] = (group, filled + needed)
        return found


def _merged(
    groups: Sequence[Sequence[Step]], steps: Sequence[Step], reductions: Collection[Step]
) -> list[Step]:
    last = {group[-1]: group for group in groups}
    found: list[Step] = []
    for step in steps:
        if step in last:
            group = last[step]
            operands = [value for one in group for value in one.operands]
            results = [value for one in group for value in one.results]
            found.append(replace(step, operands=operands, results=results))
        elif step not in reductions:
            found.append(step)
    return found


def _ordered(steps: Sequence[Step]) -> list[Step]:
    """Keeps the order of steps, except that a step comes after those that it needs; empty if that
    is impossible."""
    maker = {value: step for step in steps for value in step.results}
    place = {step: number for number, step in enumerate(steps)}
    missing: dict[Step, int] = {}
    users: dict[Step, list[Step]] = {}
    for step in steps:
        needed = {maker[v] for v in (*step.operands, *used_in(step.bodies)) if v in maker}
        missing[step] = len(needed)
        for one in needed:
            users.setdefault(one, []).append(step)
    ready = [place[step] for step in steps if not missing[step]]
    found: list[Step] = []
    while ready:
        found.append(steps[heapq.heappop(ready)])
        for user in users.get(found[-1], ()):
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, place[user])
    return found if len(found) == len(steps) else []
