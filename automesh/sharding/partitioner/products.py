"""How XLA's partitioner splits a product of matrices, or a convolution (no jax).

It looks for dimensions that two of the three arrays split into equally many pieces, forms groups of
devices along them, and continues inside a group: over batch dimensions, else over those that the
result shares with one operand (the other is then gathered), else over contracted ones (the result
is then reduced). It first looks for groups that are the same devices for both arrays, then moves
one array to the groups of the other. Where nothing fits, the operands of a product are brought to
the split of the result, and those of a convolution are gathered. Source:
xla/service/spmd/dot_handler.cc (PartitionDot, its PartitionDotGroupOn*Impl, PartitionBaseCase and
ReshardLHSRHSToMatchOutputSharding); products in a ring of steps (windowed einsum) are decided
later, see `ir.passes.windowed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from automesh.sharding.partitioner.alignment import (
    aligned,
    are_same,
    begins_with,
    dimensions_of,
    first,
    like,
    merged,
    order_inside,
    placed,
    recut,
    repeated,
)
from automesh.sharding.partitioner.parts import (
    Group,
    PartitionedArray,
    Parts,
    count,
    overlaps,
    parts_of,
    without,
)

# The parts that split each dimension of an array.
Split = tuple[Parts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionedProduct:
    """A product of two arrays inside a group of devices.

    Attributes:
      result: as it is wanted.
      devices: the parts of mesh axes that make up the group, in the order of its devices.
      is_convolution: True for a convolution, False for a product of matrices.
    """

    left: PartitionedArray
    right: PartitionedArray
    result: PartitionedArray
    devices: Parts
    is_convolution: bool = False

    @property
    def batch(self) -> tuple[str, ...]:
        return tuple(one for one in self.result.factors if self._sides(one) == "lr")

    @property
    def contracted(self) -> tuple[str, ...]:
        return tuple(
            one
            for one in self.left.factors
            if one in self.right.factors and one not in self.result.factors
        )

    @property
    def of_left(self) -> tuple[str, ...]:
        return tuple(one for one in self.result.factors if self._sides(one) == "l")

    @property
    def of_right(self) -> tuple[str, ...]:
        return tuple(one for one in self.result.factors if self._sides(one) == "r")

    def _sides(self, factor: str) -> str:
        return "l" * (factor in self.left.factors) + "r" * (factor in self.right.factors)

    def swapped(self) -> PartitionedProduct:
        """Swaps the operands."""
        return replace(self, left=self.right, right=self.left)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSplit:
    """One way to compute a product.

    Attributes:
      left, right: the parts that split each dimension of the operands, as it needs them.
      result: the same of the result, before it is brought to the split that is wanted.
      left_before, right_before: the splits that an operand has on its way, one group inside of the
        other.
    """

    left: Split
    right: Split
    result: Split
    left_before: tuple[Split, ...] = ()
    right_before: tuple[Split, ...] = ()

    def swapped(self) -> ProductSplit:
        return replace(
            self,
            left=self.right,
            right=self.left,
            left_before=self.right_before,
            right_before=self.left_before,
        )


def way_of(product: PartitionedProduct) -> ProductSplit:
    """Returns the way that the partitioner takes."""
    for strict in (True, False):
        found = (
            _along_one_kind(product)
            or _over_batch(product, strict)
            or _over_shared_with_result(product, strict)
            or _over_contracted(product, strict)
            or _without_what_repeats_the_result(product)
            or _all_along_the_result(product)
        )
        if found is not None:
            return found
    left, right, result = product.left, product.right, product.result
    if product.is_convolution:
        return _computed(left.whole(), right.whole(), result.whole())
    return _computed(like(left, result), like(right, result), result)


def _computed(
    left: PartitionedArray, right: PartitionedArray, result: PartitionedArray
) -> ProductSplit:
    """Computes the product itself, with its operands resharded as it needs them."""
    return ProductSplit(left=left.parts, right=right.parts, result=result.parts)


def _along_one_kind(product: PartitionedProduct) -> ProductSplit | None:
    """Splits a product over all devices along one kind of its dimensions, if two arrays have it."""
    left, right, result = product.left, product.right, product.result
    devices = count(product.devices)
    if count(result.every) not in (1, devices):
        return None
    batch = product.batch
    if count(left.along(batch)) == count(right.along(batch)) == devices and _agree(
        left, right, batch
    ):
        return _computed(left, right, like(result, left))
    for one, other, back in ((left, right, False), (right, left, True)):
        if count(one.along(batch)) == devices and _agree(one, result, batch):
            way = _computed(one, like(other, one), result)
            return way.swapped() if back else way
    contracted = product.contracted
    if count(left.along(contracted)) == count(right.along(contracted)) == devices:
        smaller = left.bytes < right.bytes
        left, right = (like(left, right), right) if smaller else (left, like(right, left))
        return _computed(left, right, result.whole())
    if count(left.every) == devices and _agree(left, result, product.of_left, devices):
        return _computed(left, right.whole(), result)
    if count(right.every) == devices and _agree(right, result, product.of_right, devices):
        return _computed(left.whole(), right, result)
    return None


def _all_along_the_result(product: PartitionedProduct) -> ProductSplit | None:
    """Follows the result's split over one kind of its dimensions, though the operands have others.

    Where the result is whole, an operand follows the other one's contracted dimensions.
    """
    left, right, result = product.left, product.right, product.result
    devices = count(product.devices)
    for factors in (product.batch, product.of_left, product.of_right):
        if count(result.along(factors)) == devices:
            return _computed(like(left, result), like(right, result), result)
    if result.every:
        return None
    for one, other, back in ((right, left, True), (left, right, False)):
        along = one.along(product.contracted)
        if count(along) == devices and not other.every and one.bytes > result.bytes:
            way = _computed(one, like(other, one), result)
            return way.swapped() if back else way
    return None


def _without_what_repeats_the_result(product: PartitionedProduct) -> ProductSplit | None:
    """Leaves out the devices that only repeat the result, if the operands are whole."""
    split = product.result.every
    if product.left.every or product.right.every or count(split) in (1, count(product.devices)):
        return None
    return way_of(replace(product, devices=split))


def _over_batch(product: PartitionedProduct, strict: bool) -> ProductSplit | None:
    left, right, result = product.left, product.right, product.result
    batch = product.batch
    pieces = count(result.along(batch))
    if pieces == 1 or pieces not in (count(left.along(batch)), count(right.along(batch))):
        return None
    counts = [count(left.of(factor)) for factor in batch]
    if counts == [count(right.of(factor)) for factor in batch] and (
        not strict or _agree(left, right, batch)
    ):
        larger = left if left.local_bytes > right.local_bytes else right
        group = {factor: larger.of(factor) for factor in batch}
        order = order_inside(larger, batch, product.devices)
        wanted = recut(result, _having(result, batch, counts), product.devices)
        moved = [
            one if one is larger else one and aligned(one, group, order)
            for one in (left, right, wanted)
        ]
    else:
        group = {factor: result.of(factor) for factor in batch}
        order = order_inside(result, batch, product.devices)
        moved = [
            _along_the_batch(product, group, order, strict),
            _along_the_batch(product.swapped(), group, order, strict),
            result,
        ]
    return _in_group(product, group, order, moved)


def _along_the_batch(
    product: PartitionedProduct, group: Group, order: Parts, strict: bool
) -> PartitionedArray | None:
    """Returns the left operand in the groups of the result's batch dimensions.

    Devices along which another of its dimensions is split can be used for the batch: those that
    repeat it, else all of its own dimensions, else all contracted ones. If they are not as many as
    needed, there is no way.
    """
    operand, other = product.left, product.right
    if not operand.every:
        return _along(operand, group)
    counts = _having(operand, group, [count(parts) for parts in group.values()])
    devices, repeats = count(product.devices), count(repeated(operand, product.devices))
    needed = repeats
    for pieces in counts:
        needed *= pieces
    ratio, rest = divmod(needed, devices)
    if rest or not ratio:
        return None
    contracted = count(operand.along(product.contracted))
    whole: tuple[str, ...] = ()
    if ratio > 1 and repeats % ratio:
        if ratio == count(operand.along(product.of_left)) and (
            ratio != contracted or contracted == count(other.along(product.contracted))
        ):
            whole = product.of_left
        elif ratio == contracted:
            whole = product.contracted
        else:
            return None
    counts = [
        1 if factor in whole else pieces
        for factor, pieces in zip(operand.factors, counts, strict=True)
    ]
    cut = recut(operand, counts, product.devices)
    moved = cut and aligned(cut, group, order)
    return None if strict and moved != operand else moved


def _over_shared_with_result(product: PartitionedProduct, strict: bool) -> ProductSplit | None:
    """Groups over dimensions that the result shares with one operand only."""
    for side, factors in _sides_to_share(product):
        group = {factor: side.result.of(factor) for factor in factors}
        order = order_inside(side.result, factors, side.devices)
        counts = _having(side.left, factors, [count(parts) for parts in group.values()])
        cut = recut(side.left, counts, side.devices)
        matched = cut and aligned(cut, group, order)
        if matched is None or (strict and matched != side.left):
            return None
        other = _whole_in_groups(side, group, order)
        way = _in_group(side, group, order, [matched, other, side.result])
        return way if way is None or side.left is product.left else way.swapped()
    return None


def _sides_to_share(
    product: PartitionedProduct,
) -> Iterator[tuple[PartitionedProduct, tuple[str, ...]]]:
    """Returns the operand that is not moved, as the left one, and the dimensions to share."""
    sides = [(product.swapped(), product.of_right), (product, product.of_left)]
    exact = [
        (side, factors)
        for side, factors in sides
        if count(side.left.along(factors)) == count(side.result.along(factors)) > 1
    ]
    if exact:
        # The one with which less of the other operand is repeated.
        yield min(
            exact, key=lambda one: count(one[0].left.along(one[1])) * one[0].right.local_bytes
        )
        return
    for side, factors in reversed(sides):
        if count(side.left.along(factors)) > 1 and count(side.result.along(factors)) > 1:
            matching = tuple(
                factor
                for factor in factors
                if count(side.left.of(factor)) == count(side.result.of(factor)) > 1
            )
            if matching:
                yield side, matching
            return


def _whole_in_groups(side: PartitionedProduct, group: Group, order: Parts) -> PartitionedArray:
    """Prepares the operand that has none of the group's dimensions, the right one.

    Where it is split over the group's parts, its pieces move to devices that only repeat it, if
    there are enough of them; else it is gathered.
    """
    found = _gathered_in_groups(side, side.right, group, order)
    if found is None and side.right.every and not side.is_convolution:
        wanted = _wanted_by_others(side)
        found = _gathered_in_groups(side, wanted, group, order)
    return side.right.whole() if found is None else found


def _gathered_in_groups(
    side: PartitionedProduct, other: PartitionedArray, group: Group, order: Parts
) -> PartitionedArray | None:
    parts = parts_of(group)
    pieces = count(parts)
    free = repeated(other, side.devices)
    if other.every and count(free) > 1 and count(free) % pieces == 0:
        if not overlaps(other.every, parts):
            return other
        for factor in reversed(other.factors):
            if (
                count(without(parts, other.of(factor))) == 1
                and not count(other.of(factor)) % pieces
            ):
                # The dimension changes places with what repeats the array.
                return other.having(factor, merged(free))
        return placed(other, (), order)
    found = dimensions_of(other, parts, side.devices)
    if found is not None:
        for factor in found:
            other = other.having(factor, ())
        return other
    contracted, own = (
        count(side.right.along(factors)) for factors in (side.contracted, side.of_right)
    )
    may_gather_contracted = contracted == pieces and own == count(side.result.along(side.of_right))
    may_gather_own = own == pieces and contracted == count(side.left.along(side.contracted))
    if may_gather_contracted and (
        not may_gather_own or other.local_bytes <= side.result.local_bytes
    ):
        return placed(other, side.contracted, order)
    return placed(other, side.of_right, order) if may_gather_own else None


def _wanted_by_others(side: PartitionedProduct) -> PartitionedArray:
    """Returns the right operand as the left one and the result would have it
    (`InferDotOperandSharding`)."""
    by_result, by_left = like(side.right, side.result), like(side.right, side.left)
    both = by_result
    for factor in side.right.factors:
        parts = by_left.of(factor)
        if parts and not by_result.of(factor):
            both = both.having(factor, parts)
    if count(without(side.devices, both.every)) * count(both.every) == count(side.devices):
        return both
    return by_left if count(by_left.every) > count(by_result.every) else by_result


def _over_contracted(product: PartitionedProduct, strict: bool) -> ProductSplit | None:
    left, right = product.left, product.right
    every = product.contracted
    equal = tuple(one for one in every if count(left.of(one)) == count(right.of(one)) > 1)
    for factors in (every, equal):
        pieces = count(left.along(factors))
        if pieces == 1 or pieces != count(right.along(factors)):
            continue
        larger, smaller = (left, right) if left.local_bytes > right.local_bytes else (right, left)
        group = {factor: larger.of(factor) for factor in factors}
        order = order_inside(larger, factors, product.devices)
        counts = _having(smaller, factors, [count(parts) for parts in group.values()])
        cut = recut(smaller, counts, product.devices)
        moved = cut and aligned(cut, group, order)
        if moved is None or (strict and moved != smaller):
            continue
        operands = (larger, moved) if larger is left else (moved, larger)
        inside = replace(product, left=operands[0], right=operands[1])
        return _in_group(product, group, order, [*operands, _reduced_in(inside, group, order)])
    return None


def _reduced_in(product: PartitionedProduct, group: Group, order: Parts) -> PartitionedArray | None:
    """Returns the result inside of groups that then add up their parts.

    What splits it over the devices of the group is cut afterwards.
    """
    left, right, result, devices = product.left, product.right, product.result, product.devices
    pieces, parts = count(parts_of(group)), parts_of(group)
    factors = (product.of_left, product.of_right, product.batch)
    shared = [count(result.along(one)) for one in factors]
    free = repeated(result, devices)
    if result.every and (count(free) == 1 or count(free) % pieces):
        split = [one for one in (left, right) if one.inside(tuple(group)).every]
        if len(split) == 1:
            follows = like(result, split[0])
            if all(
                begins_with(wanted, given)
                for wanted, given in zip(result.parts, follows.parts, strict=True)
            ):
                result, free = follows, repeated(follows, devices)
    if not result.every:
        return result
    if count(free) > 1 and count(free) % pieces == 0:
        if are_same(first(free, pieces), parts):
            return result
        return placed(result, (), order)
    found = dimensions_of(result, parts, devices)
    if found is not None:
        for factor in found:
            result = result.having(factor, ())
        return result
    for along, has in zip(factors, shared, strict=True):
        if has == pieces:
            return placed(result, along, order)
    return result.whole()


def _having(array: PartitionedArray, factors: Iterable[str], counts: list[int]) -> list[int]:
    """Returns the number of pieces of each dimension, some of them replaced."""
    wanted = dict(zip(factors, counts, strict=True))
    return [
        wanted.get(factor, count(parts))
        for factor, parts in zip(array.factors, array.parts, strict=True)
    ]


def _along(array: PartitionedArray, group: Group) -> PartitionedArray:
    for factor, parts in group.items():
        array = array.having(factor, parts)
    return array


def _agree(
    one: PartitionedArray, other: PartitionedArray, factors: Iterable[str], pieces: int = 0
) -> bool:
    """Whether two arrays are split over the same devices along some dimensions, into `pieces` if
    that is stated."""
    factors = tuple(factors)
    if pieces and count(one.along(factors)) != pieces:
        return False
    return all(merged(one.of(factor)) == merged(other.of(factor)) for factor in factors)


def _in_group(
    product: PartitionedProduct,
    group: Group,
    order: Parts,
    arrays: list[PartitionedArray | None],
) -> ProductSplit | None:
    """Continues inside one group of devices, which lie in an order."""
    left, right, result = arrays
    if left is None or right is None or result is None:
        return None
    factors = tuple(group)
    inner = way_of(
        replace(
            product,
            left=left.inside(factors),
            right=right.inside(factors),
            result=result.inside(factors),
            devices=order,
        )
    )
    return ProductSplit(
        left=left.with_group(inner.left, group),
        right=right.with_group(inner.right, group),
        result=result.with_group(inner.result, group),
        left_before=(left.parts, *(left.with_group(one, group) for one in inner.left_before)),
        right_before=(right.parts, *(right.with_group(one, group) for one in inner.right_before)),
    )
