"""Describes how arrays are split over parts of mesh axes (no jax)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a mesh axis; the whole axis if `before` is 1 and `size` is that of the axis.

    Attributes:
      axis: name of the mesh axis.
      before: product of the more significant factors of the axis; 2 for `tp:(2)4`.
      size: devices that this part counts.
    """

    axis: str
    before: int
    size: int


Parts = tuple[Part, ...]
# The parts along which groups of devices are formed, by factor.
Group = Mapping[str, Parts]


def parts_of(group: Group) -> Parts:
    """Lists all parts along which a group of devices is formed."""
    return tuple(part for parts in group.values() for part in parts)


def count(parts: Iterable[Part]) -> int:
    """Counts the pieces of a dimension that is split over `parts`."""
    return math.prod(part.size for part in parts)


def without(parts: Iterable[Part], taken: Iterable[Part]) -> Parts:
    """Returns the remaining `parts`; a part whose middle is taken leaves both its ends."""
    left = list(parts)
    for gone in taken:
        left = [piece for part in left for piece in _left_of(part, gone)]
    return tuple(left)


def _left_of(part: Part, gone: Part) -> Iterator[Part]:
    if part.axis != gone.axis:
        yield part
        return
    end, gone_end = part.before * part.size, gone.before * gone.size
    first, last = max(part.before, gone.before), min(end, gone_end)
    if first >= last:
        yield part
        return
    if first > part.before:
        yield Part(axis=part.axis, before=part.before, size=first // part.before)
    if last < end:
        yield Part(axis=part.axis, before=last, size=end // last)


def overlaps(parts: Iterable[Part], others: Iterable[Part]) -> bool:
    """Whether two parts share a factor of their axis."""
    parts = tuple(parts)
    return count(without(parts, others)) != count(parts)


def take(parts: Iterable[Part], pieces: int) -> Parts | None:
    """Takes parts, the last one cut, that make exactly `pieces`; None if impossible."""
    taken: list[Part] = []
    for part in parts:
        if pieces == 1:
            break
        if pieces % part.size == 0:
            taken.append(part)
            pieces //= part.size
        elif part.size % pieces == 0:
            taken.append(replace(part, size=pieces))
            pieces = 1
    return tuple(taken) if pieces == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedArray:
    """One array inside a group of devices.

    Attributes:
      factors: what each dimension is to the operation, a letter of its sharding rule.
      parts: what splits each dimension, the most significant part first.
      bytes: of the whole array, as the group has it.
    """

    factors: tuple[str, ...]
    parts: tuple[Parts, ...]
    bytes: float

    @property
    def every(self) -> Parts:
        """Lists all parts that split the array."""
        return tuple(part for parts in self.parts for part in parts)

    @property
    def local_bytes(self) -> float:
        return self.bytes / count(self.every)

    def of(self, factor: str) -> Parts:
        """Returns the parts that split the dimension of a factor; empty without one."""
        return self.parts[self.factors.index(factor)] if factor in self.factors else ()

    def along(self, factors: Iterable[str]) -> Parts:
        """Returns the parts that split the dimensions of some factors together."""
        return tuple(part for factor in factors for part in self.of(factor))

    def having(self, factor: str, parts: Parts) -> PartitionedArray:
        """Returns the array with another split of one dimension."""
        if factor not in self.factors:
            return self
        place = self.factors.index(factor)
        return replace(self, parts=(*self.parts[:place], parts, *self.parts[place + 1 :]))

    def whole_over(self, taken: Iterable[Part]) -> PartitionedArray:
        """Returns the array after a gather over some parts."""
        taken = tuple(taken)
        return replace(self, parts=tuple(without(parts, taken) for parts in self.parts))

    def along_group(self, group: Group) -> PartitionedArray:
        """Returns the array split over a group's parts along its dimensions, and nowhere else."""
        moved = self.whole_over(parts_of(group))
        for factor, parts in group.items():
            moved = moved.having(factor, parts)
        return moved

    def with_group(self, inner: Sequence[Parts], group: Group) -> tuple[Parts, ...]:
        """Returns the parts of each dimension: those of the group, then those inside it."""
        return tuple(
            (*group.get(factor, ()), *parts)
            for factor, parts in zip(self.factors, inner, strict=True)
        )

    def whole(self) -> PartitionedArray:
        return replace(self, parts=((),) * len(self.parts))

    def inside(self, factors: Sequence[str]) -> PartitionedArray:
        """Returns the array's part at one position of the dimensions of `factors`."""
        share = self.bytes / count(self.along(factors))
        inner = replace(self, bytes=share)
        for factor in factors:
            inner = inner.having(factor, ())
        return inner


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cost:
    """The cost that the partitioner compares: most memory of one operation, then sent bytes."""

    memory_bytes: float = 0.0
    sent_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            memory_bytes=max(self.memory_bytes, other.memory_bytes),
            sent_bytes=self.sent_bytes + other.sent_bytes,
        )


def resharding(before: PartitionedArray, after: PartitionedArray) -> Cost:
    """Returns the cost of resharding an array."""
    have, want = before.local_bytes, after.local_bytes
    kept = all(
        tuple(wanted[: len(given)]) == given
        for given, wanted in zip(before.parts, after.parts, strict=True)
    )
    if kept:
        return Cost()
    if want > have:
        return Cost(memory_bytes=have + want, sent_bytes=want)
    return Cost(memory_bytes=2.0 * have, sent_bytes=have)


def reducing(local_bytes: float, parts: Iterable[Part]) -> Cost:
    """Returns the cost of an all-reduce."""
    if count(parts) == 1:
        return Cost()
    return Cost(memory_bytes=local_bytes, sent_bytes=2.0 * local_bytes)
