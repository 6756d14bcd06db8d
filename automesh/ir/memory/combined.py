"""Merges the all-reduces of a block that a compiler combines into one, for the memory of a step.

A combined all-reduce waits until the last of its operands is there, and makes all of its results at
once: the gradients of all layers live together, before and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from automesh.ir.graph import Value, used_in
from automesh.ir.memory.order import Step

_Key = tuple[str, ...]


def with_combined_reductions(steps: Sequence[Step]) -> list[Step]:
    """Merges all-reduces over the same axes that do not need each other.

    A merged step stands where the last of its all-reduces stood. It may come after steps that read
    its results: order the steps by what they need.
    """
    reductions = {step: _axes(step) for step in steps if step.name == "all_reduce"}
    if len(reductions) < 2:
        return list(steps)
    # Two groups over different axes may need each other, if levels count the same axes alone.
    for is_counted in (lambda one, other: one == other, lambda one, other: True):
        levels = _levels(steps, reductions, is_counted)
        merged = _merged(steps, reductions, levels)
        if _is_possible(merged):
            return merged
    return list(steps)


def _axes(step: Step) -> _Key:
    return tuple(step.operation.attributes.get("axes", ()))


def _levels(
    steps: Sequence[Step],
    reductions: Mapping[Step, _Key],
    is_counted: Callable[[_Key, _Key], bool],
) -> dict[Step, int]:
    """Counts the all-reduces that lie one behind another before each all-reduce.

    Args:
      is_counted: whether those over the second axes count for those over the first.
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
            if own is not None and is_counted(key, own):
                level += 1
            if level:
                behind.update(dict.fromkeys(step.results, level))
    return found


def _merged(
    steps: Sequence[Step], reductions: Mapping[Step, _Key], levels: Mapping[Step, int]
) -> list[Step]:
    groups: dict[tuple[_Key, int], list[Step]] = {}
    for step, axes in reductions.items():
        groups.setdefault((axes, levels[step]), []).append(step)
    last = {group[-1]: group for group in groups.values()}
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


def _is_possible(steps: Sequence[Step]) -> bool:
    """Whether some order of the steps makes every value before it is read."""
    maker = {value: step for step in steps for value in step.results}
    missing: dict[Step, int] = {}
    users: dict[Step, list[Step]] = {}
    for step in steps:
        needed = {maker[v] for v in (*step.operands, *used_in(step.bodies)) if v in maker}
        missing[step] = len(needed)
        for one in needed:
            users.setdefault(one, []).append(step)
    ready = [step for step in steps if not missing[step]]
    ran = 0
    while ready:
        ran += 1
        for user in users.get(ready.pop(), ()):
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return ran == len(steps)
