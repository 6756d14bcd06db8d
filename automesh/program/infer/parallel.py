"""Layers that are written out one after the other have classes that are nothing to each other in
the flow, and one decision is enough for all of them (no jax)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from automesh.program.infer.dimensions import Dimensions, Dims, Mark
from automesh.program.infer.facts import Facts, outer

_NUMBER = re.compile(r"\d+")
_MOST_NUMBERS = 6
_Uses = frozenset[tuple[str, int]]


def join_parallel(every: Dimensions, found: Facts, weights: Sequence[tuple[str, Dims]]) -> None:
    """Joins classes of equal size that hold the same dimensions of the same weights of other
    layers: those whose paths differ in one number. No array gets one class twice by that.

    Args:
      weights: path and dimensions of each parameter.
    """
    for position in range(_MOST_NUMBERS):
        uses: dict[int, set[tuple[str, int]]] = defaultdict(set)
        any_number = False
        for name, dims in weights:
            pattern = _without_number(name, position)
            any_number = any_number or pattern != name
            for place, dim in enumerate(dims):
                root = outer(every, dim)
                if root is not None:
                    uses[root].add((pattern, place))
        if not any_number:
            return
        _join_alike(every, found, weights, {root: frozenset(own) for root, own in uses.items()})


def join_kernels(every: Dimensions, found: Facts) -> None:
    """Joins the windows of convolutions that are equally wide: none is ever split."""
    first: dict[int, int] = {}
    for root in sorted(found.weights):
        if every.find(root) == root and every.marks(root) & Mark.KERNEL:
            every.join((first.setdefault(every.size(root), root),), (root,))


def _without_number(name: str, position: int) -> str:
    numbers = list(_NUMBER.finditer(name))
    if position >= len(numbers):
        return name
    begin, end = numbers[position].span()
    return f"{name[:begin]}*{name[end:]}"


def _join_alike(
    every: Dimensions,
    found: Facts,
    weights: Sequence[tuple[str, Dims]],
    uses: dict[int, _Uses],
) -> None:
    alike: dict[tuple[_Uses, int], list[int]] = defaultdict(list)
    for root, own in uses.items():
        if any("*" in pattern for pattern, _ in own):
            alike[own, every.size(root)].append(root)
    groups = {
        root: number
        for number, group in enumerate(alike.values())
        if len(group) > 1
        for root in group
    }
    if not groups:
        return
    twice: set[int] = set()
    for _, dims in weights:
        own = {root for dim in dims if (root := outer(every, dim)) in groups}
        numbers = [groups[root] for root in own]
        twice |= {number for number in numbers if numbers.count(number) > 1}
    for number, group in enumerate(alike.values()):
        if len(group) > 1 and number not in twice:
            for other in group[1:]:
                every.join((group[0],), (other,))
                found.weights.add(every.find(group[0]))
