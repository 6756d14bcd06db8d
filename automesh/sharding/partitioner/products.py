"""How XLA's partitioner splits a product of matrices, or a convolution (no jax).

It looks for dimensions that two of the three arrays split into equally many pieces, forms groups of
devices along them, and continues inside a group: over batch dimensions, over those that the result
shares with one operand (the other is then gathered), or over contracted ones (the result is then
reduced). Among several ways it takes the one with the least memory for one operation, and among
equals the one that sends least. Source: xla/service/spmd/dot_handler.cc (PartitionDot, its
PartitionDotGroupOn*Impl and PartitionBaseCase); products in a ring of steps (windowed einsum) are
decided later, see `ir.passes.windowed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from automesh.sharding.partitioner.parts import (
    Cost,
    Group,
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
class PartitionedProduct:
    """A product of two arrays inside a group of devices.

    Attributes:
      result: as it is wanted.
      devices: the parts of mesh axes that make up the group.
    """

    left: PartitionedArray
    right: PartitionedArray
    result: PartitionedArray
    devices: Parts

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
    """

    left: tuple[Parts, ...]
    right: tuple[Parts, ...]
    result: tuple[Parts, ...]
    cost: Cost

    def swapped(self) -> ProductSplit:
        return replace(self, left=self.right, right=self.left)


def way_of(product: PartitionedProduct) -> ProductSplit:
    """Returns the way that the partitioner takes."""
    for strict in (True, False):
        found = _best(product, strict) or _all_along_the_result(product)
        if found is not None:
            return found
    return _computed(product, product.left.whole(), product.right.whole(), product.result.whole())


def _best(product: PartitionedProduct, strict: bool) -> ProductSplit | None:
    methods: tuple[Callable[[PartitionedProduct, bool], ProductSplit | None], ...] = (
        _over_batch,
        _over_shared_with_result,
        _over_contracted,
    )
    ways = [way for method in methods if (way := method(product, strict)) is not None]
    return min(ways, key=lambda way: way.cost, default=None)


def _computed(
    product: PartitionedProduct,
    left: PartitionedArray,
    right: PartitionedArray,
    result: PartitionedArray,
) -> ProductSplit:
    """Computes the product itself, with its operands resharded as it needs them."""
    own = Cost(memory_bytes=left.local_bytes + right.local_bytes + result.local_bytes)
    return ProductSplit(
        left=left.parts,
        right=right.parts,
        result=result.parts,
        cost=own + resharding(product.left, left) + resharding(product.right, right),
    )


def _all_along_the_result(product: PartitionedProduct) -> ProductSplit | None:
    """Follows the result's split over one kind of its dimensions, if nothing matches."""
    left, right, result = product.left, product.right, product.result
    if not left.every and not right.every:
        product = replace(product, devices=result.every)
    devices = count(product.devices)
    if devices == 1:
        return _computed(product, left, right, result)
    for factors in (product.batch, product.of_left, product.of_right):
        if count(result.along(factors)) == devices:
            return _computed(
                product, _split_like_result(left, result), _split_like_result(right, result), result
            )
    if result.every:
        return None
    for one, other, back in ((left, right, False), (right, left, True)):
        along = one.along(product.contracted)
        if count(along) == devices and not other.every and one.bytes > result.bytes:
            sliced = other
            for factor in product.contracted:
                sliced = sliced.having(factor, one.of(factor))
            pair = (sliced, one) if back else (one, sliced)
            way = _computed(product, *pair, result)
            return replace(way, cost=way.cost + reducing(result.local_bytes, along))
    return None


def _split_like_result(operand: PartitionedArray, result: PartitionedArray) -> PartitionedArray:
    """Returns an operand that is split like the result, and no further."""
    return replace(operand, parts=tuple(result.of(factor) for factor in operand.factors))


def _over_batch(product: PartitionedProduct, strict: bool) -> ProductSplit | None:
    left, right, result = product.left, product.right, product.result
    batch = product.batch
    wanted = count(result.along(batch))
    if wanted == 1 or wanted not in (count(left.along(batch)), count(right.along(batch))):
        return None
    group = {factor: result.of(factor) for factor in batch}
    if _counts(left, batch) == _counts(right, batch):
        larger = left if left.local_bytes > right.local_bytes else right
        group = {factor: larger.of(factor) for factor in batch}
    moved = [_operand_in_group(operand, group, strict) for operand in (left, right)]
    if moved[0] is None or moved[1] is None:
        return None
    return _in_group(product, group, moved[0], moved[1], result.along_group(group))


def _over_shared_with_result(product: PartitionedProduct, strict: bool) -> ProductSplit | None:
    """Groups over dimensions that the result shares with one operand only."""
    sides = [(product, product.of_left), (product.swapped(), product.of_right)]
    exact = [
        (side, factors)
        for side, factors in sides
        if count(side.left.along(factors)) == count(side.result.along(factors)) > 1
    ]
    if len(exact) == 2:
        # The larger operand is not moved.
        exact.sort(key=lambda one: -one[0].left.local_bytes)
    for side, factors in exact or _partly_shared(sides):
        group = {factor: side.result.of(factor) for factor in factors}
        matched = _operand_in_group(side.left, group, strict)
        if matched is None:
            return None
        other = _whole_in_groups(side.right, group, side.devices)
        way = _in_group(side, group, matched, other, side.result)
        return way if side is product else way.swapped()
    return None


def _partly_shared(
    sides: Sequence[tuple[PartitionedProduct, tuple[str, ...]]],
) -> Iterator[tuple[PartitionedProduct, tuple[str, ...]]]:
    for side, factors in sides:
        if count(side.left.along(factors)) > 1 and count(side.result.along(factors)) > 1:
            matching = tuple(
                factor
                for factor in factors
                if count(side.left.of(factor)) == count(side.result.of(factor)) > 1
            )
            if matching:
                yield side, matching
            return


def _over_contracted(product: PartitionedProduct, strict: bool) -> ProductSplit | None:
    left, right, result = product.left, product.right, product.result
    contracted = product.contracted
    if count(left.along(contracted)) != count(right.along(contracted)):
        contracted = tuple(
            factor for factor in contracted if count(left.of(factor)) == count(right.of(factor)) > 1
        )
    if count(left.along(contracted)) == 1:
        return None
    larger = left if left.local_bytes > right.local_bytes else right
    group = {factor: larger.of(factor) for factor in contracted}
    moved = [_operand_in_group(operand, group, strict) for operand in (left, right)]
    if moved[0] is None or moved[1] is None:
        return None
    reduced = parts_of(group)
    inner = _move_off(result, reduced, product.devices)
    way = _in_group(product, group, moved[0], moved[1], inner)
    local = replace(result, parts=way.result).local_bytes
    return replace(way, cost=way.cost + reducing(local, reduced))


def _counts(split: PartitionedArray, factors: Iterable[str]) -> list[int]:
    return [count(split.of(factor)) for factor in factors]


def _operand_in_group(
    operand: PartitionedArray, group: Group, strict: bool
) -> PartitionedArray | None:
    """Returns an operand as the group needs it; None if it would have to move between groups."""
    if strict and any(operand.of(factor) != wanted for factor, wanted in group.items()):
        return None
    return operand.along_group(group)


def _whole_in_groups(other: PartitionedArray, group: Group, devices: Parts) -> PartitionedArray:
    """Prepares the operand that has none of the group's dimensions.

    Where it is split over the group's parts, it moves to devices that only repeat it, if there are
    enough of them; else it is gathered.
    """
    parts = parts_of(group)
    if not overlaps(other.every, parts):
        return other
    repeated = count(devices) // count(other.every)
    if repeated % count(parts):
        return other.whole_over(parts)
    return _move_off(other, parts, devices)


def _move_off(split: PartitionedArray, parts: Parts, devices: Parts) -> PartitionedArray:
    """Moves an array off some parts: to free ones as far as possible, else gathers it."""
    if not overlaps(split.every, parts):
        return split
    repeated = count(devices) // count(split.every)
    stays = split.whole_over(parts)
    if repeated % count(parts):
        return stays
    free = without(devices, (*parts, *stays.every))
    for factor, before, kept in zip(split.factors, split.parts, stays.parts, strict=True):
        missing = count(before) // count(kept)
        found = take(free, missing)
        if found is None:
            continue
        free = without(free, found)
        stays = stays.having(factor, (*kept, *found))
    return stays


def _in_group(
    product: PartitionedProduct,
    group: Group,
    left: PartitionedArray,
    right: PartitionedArray,
    result: PartitionedArray,
) -> ProductSplit:
    """Continues inside one group of devices."""
    factors = tuple(group)
    parts = parts_of(group)
    inner = way_of(
        PartitionedProduct(
            left=left.inside(factors),
            right=right.inside(factors),
            result=result.inside(factors),
            devices=without(product.devices, parts),
        )
    )
    return ProductSplit(
        left=left.with_group(inner.left, group),
        right=right.with_group(inner.right, group),
        result=result.with_group(inner.result, group),
        cost=inner.cost + resharding(product.left, left) + resharding(product.right, right),
    )
