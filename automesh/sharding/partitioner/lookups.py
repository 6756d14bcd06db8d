"""How XLA's partitioner splits a gather or a scatter (no jax).

Both have a large array (the operand), indices, and one slice for each index (the result of a
gather, the updates of a scatter). Groups of devices are formed along one kind of dimension after
the other: those that all three share; those that every slice has whole; those that are looked up
(every device looks into its own part, and a gather is reduced afterwards); those of the indices
(the operand is gathered, and a scatter is reduced afterwards). The first kind is the one that needs
the least memory for one operation; among equals, the one that sends least. Source:
xla/service/spmd/gather_scatter_handler.cc (PartitionGather, PartitionScatter) and
hlo_sharding_util.cc (GroupShardingOnReplicatedDim). `python -m benchmarks.terms` compares it with
compiled modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from automesh.sharding.partitioner.parts import (
    Cost,
    Group,
    Part,
    PartitionedArray,
    Parts,
    count,
    overlaps,
    parts_of,
    reducing,
    resharding,
    take,
    without,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedLookup:
    """A gather or a scatter inside a group of devices.

    Attributes:
      operand: of a scatter, also its result.
      slices: the result of a gather as it is wanted, or the updates of a scatter.
      looked_up: factors of the operand that the indices point into, one element at a time.
      scatters: True for a scatter.
      devices: the parts of mesh axes that make up the group.
    """

    operand: PartitionedArray
    indices: PartitionedArray
    slices: PartitionedArray
    looked_up: tuple[str, ...]
    scatters: bool
    devices: Parts

    @property
    def shared(self) -> tuple[str, ...]:
        """Factors of all three: batch dimensions."""
        return tuple(one for one in self._common(self.operand) if one in self.indices.factors)

    @property
    def passed(self) -> tuple[str, ...]:
        """Factors that every slice has whole."""
        return tuple(one for one in self._common(self.operand) if one not in self.indices.factors)

    @property
    def indexed(self) -> tuple[str, ...]:
        """Factors of the indices that the operand does not have."""
        return tuple(one for one in self._common(self.indices) if one not in self.operand.factors)

    def _common(self, other: PartitionedArray) -> tuple[str, ...]:
        return tuple(one for one in self.slices.factors if one in other.factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupSplit:
    """The parts that split each dimension of the three, as the lookup needs or leaves them."""

    operand: tuple[Parts, ...]
    indices: tuple[Parts, ...]
    slices: tuple[Parts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouping:
    """One way to form groups of devices.

    Attributes:
      group: the parts along the grouped dimensions.
      reduced: parts over which a result is reduced afterwards.
    """

    group: Group
    operand: PartitionedArray
    indices: PartitionedArray
    slices: PartitionedArray
    reduced: Parts = ()

    @property
    def parts(self) -> Parts:
        return parts_of(self.group)


def way_of(lookup: PartitionedLookup) -> LookupSplit:
    """Finds the split that the partitioner chooses."""
    steps = [
        step
        for step in (
            _over_shared(lookup),
            _over_passed(lookup),
            _over_looked_up(lookup),
            _over_indexed(lookup),
        )
        if step is not None
    ]
    if not steps:
        return LookupSplit(
            operand=lookup.operand.whole().parts,
            indices=lookup.indices.whole().parts,
            slices=lookup.slices.whole().parts,
        )
    # Shared dimensions come first, whatever they cost.
    chosen = min(steps, key=lambda step: (not _is_shared(lookup, step), _cost(lookup, step)))
    factors = tuple(chosen.group)
    inner = way_of(
        replace(
            lookup,
            operand=chosen.operand.inside(factors),
            indices=chosen.indices.inside(factors),
            slices=chosen.slices.inside(factors),
            devices=without(lookup.devices, chosen.parts),
        )
    )
    return LookupSplit(
        operand=chosen.operand.with_group(inner.operand, chosen.group),
        indices=chosen.indices.with_group(inner.indices, chosen.group),
        slices=chosen.slices.with_group(inner.slices, chosen.group),
    )


def _is_shared(lookup: PartitionedLookup, step: _Grouping) -> bool:
    return bool(lookup.shared) and set(step.group) <= set(lookup.shared)


def _cost(lookup: PartitionedLookup, step: _Grouping) -> Cost:
    """Returns the cost of a grouping if nothing in a group were split any further."""
    factors = tuple(step.group)
    operand, indices, slices = (
        one.inside(factors) for one in (step.operand, step.indices, step.slices)
    )
    own = operand.bytes * (2.0 if lookup.scatters else 1.0) + indices.bytes + slices.bytes
    made = operand if lookup.scatters else slices
    return (
        Cost(memory_bytes=own)
        + resharding(lookup.operand, step.operand)
        + resharding(operand, operand.whole())
        + resharding(lookup.indices, step.indices)
        + resharding(indices, indices.whole())
        + (resharding(lookup.slices, step.slices) if lookup.scatters else Cost())
        + (resharding(slices, slices.whole()) if lookup.scatters else Cost())
        + reducing(made.bytes, step.reduced)
    )


def _over_shared(lookup: PartitionedLookup) -> _Grouping | None:
    shared = lookup.shared
    operand, indices = lookup.operand, lookup.indices
    leading = max((operand, indices), key=lambda one: count(one.along(shared)))
    if count(leading.along(shared)) == 1:
        return None
    group = {factor: leading.of(factor) for factor in shared}
    return _Grouping(
        group=group,
        operand=operand.along_group(group),
        indices=indices.along_group(group),
        slices=lookup.slices.along_group(group),
    )


def _over_passed(lookup: PartitionedLookup) -> _Grouping | None:
    passed = lookup.passed
    if count(lookup.operand.along(passed)) == 1:
        return None
    group = {factor: lookup.operand.of(factor) for factor in passed}
    parts = parts_of(group)
    return _Grouping(
        group=group,
        operand=lookup.operand,
        indices=_regrouped(lookup.indices, parts, lookup.devices, _by_priority(lookup, "indices")),
        slices=lookup.slices.along_group(group),
    )


def _over_looked_up(lookup: PartitionedLookup) -> _Grouping | None:
    parts = lookup.operand.along(lookup.looked_up)
    if count(parts) == 1:
        return None
    return _Grouping(
        group={factor: lookup.operand.of(factor) for factor in lookup.looked_up},
        operand=lookup.operand,
        indices=_regrouped(lookup.indices, parts, lookup.devices, _by_priority(lookup, "indices")),
        slices=_regrouped(lookup.slices, parts, lookup.devices, _by_priority(lookup, "slices")),
        reduced=() if lookup.scatters else parts,
    )


def _over_indexed(lookup: PartitionedLookup) -> _Grouping | None:
    group = {
        factor: _if_finer(lookup.indices.of(factor), lookup.slices.of(factor))
        for factor in lookup.indexed
    }
    parts = parts_of(group)
    if count(parts) == 1:
        return None
    return _Grouping(
        group=group,
        operand=_regrouped(lookup.operand, parts, lookup.devices, _by_priority(lookup, "operand")),
        indices=lookup.indices.along_group(group),
        slices=lookup.slices.along_group(group),
        reduced=parts if lookup.scatters else (),
    )


def _if_finer(own: Parts, other: Parts) -> Parts:
    """Returns the other array's parts, if they only split further."""
    return other if other[: len(own)] == own else own


def _by_priority(lookup: PartitionedLookup, name: str) -> tuple[str, ...]:
    """Orders the dimensions that are gathered first if an array has to be."""
    if name == "operand":
        return (*lookup.looked_up, *lookup.passed)
    if name == "indices":
        own = [one for one in lookup.indices.factors if one not in lookup.shared]
        return (*own, *lookup.shared)
    rest = [one for one in lookup.slices.factors if one not in lookup.passed]
    return (*rest, *lookup.passed)


def _regrouped(
    split: PartitionedArray, parts: Parts, devices: Parts, order: Sequence[str]
) -> PartitionedArray:
    """Moves an array off the parts along which groups are formed.

    It keeps as many pieces as the free devices inside a group allow; dimensions are gathered in
    `order` until it fits.
    """
    if not overlaps(split.every, parts):
        return split
    groups = count(parts)
    missing = groups // math.gcd(groups, count(devices) // count(split.every))
    pieces = {factor: count(split.of(factor)) for factor in split.factors}
    for factor in order:
        gathered = math.gcd(missing, pieces.get(factor, 1))
        pieces[factor] = pieces.get(factor, 1) // gathered
        missing //= gathered
    if missing > 1:
        return split.whole()
    return _placed(split, pieces, without(devices, parts))


def _placed(split: PartitionedArray, pieces: dict[str, int], inside: Parts) -> PartitionedArray:
    """Splits each dimension into so many pieces, on its own parts if they are inside the group."""
    own = {
        factor: take(_within(split.of(factor), inside), pieces[factor]) for factor in split.factors
    }
    free = without(inside, [part for parts in own.values() for part in parts or ()])
    placed = split
    for factor in split.factors:
        found = own[factor]
        if found is None:
            found = take(free, pieces[factor])
            if found is None:
                return split.whole()
            free = without(free, found)
        placed = placed.having(factor, found)
    return placed


def _within(parts: Iterable[Part], inside: Parts) -> Parts:
    return tuple(part for part in parts if not without((part,), inside))
