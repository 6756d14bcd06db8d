"""Brings the pieces of arrays to the same groups of devices, as XLA's partitioner does (no jax).

An array's tiles lie on devices in an order: the parts that split its dimensions, one dimension
after the other, then those that only repeat it. Two arrays whose groups are not the same devices
are brought together by their places in that order: the groups become those of one array, and what
is split inside of them takes the devices as they come there (`AlignGroupsWith` and
`GroupShardingOnDims` in xla/hlo/utils/hlo_sharding_util.cc).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from automesh.sharding.partitioner.parts import (
    Group,
    Part,
    PartitionedArray,
    Parts,
    count,
    parts_of,
    without,
)


def merged(parts: Iterable[Part]) -> Parts:
    """Returns parts of which those that follow each other on an axis are one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last and last.axis == part.axis and last.before * last.size == part.before:
            found[-1] = replace(last, size=last.size * part.size)
        elif part.size > 1:
            found.append(part)
    return tuple(found)


def are_same(one: Iterable[Part], other: Iterable[Part]) -> bool:
    """Whether parts count the same devices, in whatever order."""
    one, other = tuple(one), tuple(other)
    return count(one) == count(other) and count(without(one, other)) == 1


def is_inside(parts: Iterable[Part], others: Iterable[Part]) -> bool:
    """Whether all of the parts belong to others."""
    return count(without(parts, others)) == 1


def first(parts: Parts, pieces: int) -> Parts:
    """Returns the most significant parts that make some pieces; none if they cannot be cut so."""
    one = PartitionedArray(factors=("",), parts=((),), bytes=0.0)
    found = _laid(one, parts, (pieces,))
    return () if found is None else found.parts[0]


def begins_with(parts: Parts, start: Parts) -> bool:
    """Whether a dimension that some parts split is one that the others split, cut further."""
    return first(parts, count(start)) == merged(start)


def repeated(array: PartitionedArray, devices: Parts) -> Parts:
    """Returns the parts that do not split an array."""
    return without(devices, array.every)


def order_inside(array: PartitionedArray, factors: Iterable[str], devices: Parts) -> Parts:
    """Returns the order of the devices inside of groups along some dimensions of an array."""
    grouped = set(factors)
    split = [
        part
        for factor, parts in zip(array.factors, array.parts, strict=True)
        if factor not in grouped
        for part in parts
    ]
    return (*split, *repeated(array, devices))


def recut(
    array: PartitionedArray, counts: Sequence[int], devices: Parts
) -> PartitionedArray | None:
    """Returns an array whose dimensions are split into other numbers of pieces, the order of all
    devices kept; None if a part cannot be cut so."""
    if list(counts) == [count(parts) for parts in array.parts]:
        return array
    return _laid(array, (*array.every, *repeated(array, devices)), counts)


def aligned(array: PartitionedArray, group: Group, order: Parts) -> PartitionedArray | None:
    """Returns an array in the groups of another one.

    Args:
      group: the other's parts along the dimensions that make the groups.
      order: of the devices inside of the other's groups.

    Returns:
      The array with as many pieces as before; None if a part cannot be cut so.
    """
    if merged(array.along(group)) == merged(parts_of(group)):
        # The same groups: no device moves.
        return _with(array, group)
    counts = [
        1 if factor in group else count(parts)
        for factor, parts in zip(array.factors, array.parts, strict=True)
    ]
    moved = _laid(array, order, counts)
    return None if moved is None else _with(moved, group)


def placed(array: PartitionedArray, whole: Iterable[str], order: Parts) -> PartitionedArray | None:
    """Returns an array that is whole along some dimensions, and has as many pieces as before along
    the others, which lie on the devices of a group in their order."""
    gathered = set(whole)
    counts = [
        1 if factor in gathered else count(parts)
        for factor, parts in zip(array.factors, array.parts, strict=True)
    ]
    return _laid(array, order, counts)


def dimensions_of(array: PartitionedArray, parts: Parts, devices: Parts) -> list[str] | None:
    """Returns the dimensions of an array that are split over exactly some parts, together with
    what repeats it; None if there are none (`FindMatchingPartitionedDimsForGrouping`)."""
    if not array.every:
        return None
    found = [
        factor
        for factor, split in zip(array.factors, array.parts, strict=True)
        if split and is_inside(split, parts)
    ]
    free = repeated(array, devices)
    over = (*array.along(found), *(free if is_inside(free, parts) else ()))
    return found if are_same(over, parts) else None


def like(array: PartitionedArray, other: PartitionedArray) -> PartitionedArray:
    """Returns an array that is split like another one, and no further."""
    return replace(array, parts=tuple(other.of(factor) for factor in array.factors))


def _with(array: PartitionedArray, group: Group) -> PartitionedArray:
    for factor, parts in group.items():
        array = array.having(factor, merged(parts))
    return array


def _laid(array: PartitionedArray, order: Parts, counts: Sequence[int]) -> PartitionedArray | None:
    left = list(order)
    parts: list[Parts] = []
    for pieces in counts:
        taken: list[Part] = []
        while pieces > 1:
            if not left:
                return None
            first = left.pop(0)
            if pieces % first.size == 0:
                taken.append(first)
                pieces //= first.size
            elif first.size % pieces == 0:
                taken.append(replace(first, size=pieces))
                rest = first.size // pieces
                left.insert(0, Part(axis=first.axis, before=first.before * pieces, size=rest))
                pieces = 1
            else:
                return None
        parts.append(merged(taken))
    return replace(array, parts=tuple(parts))
