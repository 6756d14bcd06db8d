"""Turns collectives into `CollectiveTerm`s: what each moves, where, and what hides it.

TPU compilers overlap a gather with the kernels between the first use of the previous gather and its
own first use (54 schedules of libtpu 0.0.42 for v5e). One gather runs at a time, and the step waits
for a gather without a matrix product in that part. Such a part of a block is a slot.

    slots = slots_of(block)
    slots.of[operation]       # the slot that an operation stands in
    slots.before(gather)      # the slot that a gather hides in; None if nothing there hides it
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from automesh.collectives import STABLEHLO
from automesh.cost.terms import CollectiveTerm, Monomial, Sum, value_of
from automesh.ir.graph import (
    Block,
    Operation,
    Value,
    added,
    element_bytes,
    multiplied,
    times,
    used_in,
)
from automesh.ir.op_kinds import COLLECTIVES, PRODUCTS, VIRTUAL
from automesh.ir.passes.windowed import IN_RING, INTENSITY, RING_OF
from automesh.platforms import scheduling_of
from automesh.platforms.platform import Scheduling


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of one block, numbered from 0.

    Attributes:
      count: number of slots.
      of: slot of each operation.
    """

    count: int
    of: dict[Operation, int]
    _uses: dict[Operation, int]
    _ready: dict[Operation, int]
    _products: tuple[int, ...]
    _starts: tuple[int, ...]

    def before(self, gather: Operation) -> int | None:
        """Returns the slot that a gather may hide in; None if no product hides it there."""
        use = self._uses[gather]
        number = max(bisect_left(self._starts, use) - 1, 0)
        begins = max(self._starts[number], self._ready[gather] + 1)
        following = bisect_left(self._products, begins)
        hides = following < len(self._products) and self._products[following] < use
        return number if hides else None


def slots_of(block: Block) -> Slots:
    """Cuts a block where a gather is used for the first time, and after every loop."""
    order = {operation: place for place, operation in enumerate(block.operations)}
    end = len(block.operations)
    first = first_uses(block, order)
    uses = {one: first[one] for one in block.operations if one.name in COLLECTIVES}
    cuts = {use for one, use in uses.items() if one.name == "all_gather" and use < end}
    cuts |= {order[one] + 1 for one in block.operations if one.bodies}
    starts = (0, *sorted(cuts - {0}))
    of: dict[Operation, int] = {}
    number = 0
    for operation, place in order.items():
        while number + 1 < len(starts) and starts[number + 1] <= place:
            number += 1
        of[operation] = number
    return Slots(
        count=len(starts),
        of=of,
        _uses=uses,
        _ready=last_makers(block, order),
        _products=tuple(place for one, place in order.items() if one.name in PRODUCTS),
        _starts=starts,
    )


def first_uses(block: Block, order: Mapping[Operation, int]) -> dict[Operation, int]:
    """Finds the place of the first kernel that uses each operation's results, or views of them.

    Args:
      order: the place of each operation of the block.

    Returns:
      By operation the place; the number of operations if no kernel of the block uses them.
    """
    end = len(block.operations)
    found: dict[Operation, int] = {}
    for operation in reversed(block.operations):
        found[operation] = min(
            (
                found[user] if user.name in VIRTUAL else order[user]
                for user in _users(operation)
                if user in order
            ),
            default=end,
        )
    return found


def last_makers(block: Block, order: Mapping[Operation, int]) -> dict[Operation, int]:
    """Finds the place of the last kernel that makes what each operation reads, beyond views.

    Args:
      order: the place of each operation of the block.

    Returns:
      By operation the place; -1 if no kernel of the block makes it.
    """
    found: dict[Operation, int] = {}
    for operation in block.operations:
        found[operation] = max(
            (
                found[maker] if maker.name in VIRTUAL else order[maker]
                for maker in _makers(operation)
                if maker in order
            ),
            default=-1,
        )
    return found


# Finds the source line for an operation that the partitioner has inserted.

_FARTHEST = 64  # operations that are searched at most


def nearby_source(operation: Operation) -> str:
    """Returns its own source line; else that of the first use of its results, else of its input.

    A collective on an argument of the program or of a loop has no line of its own: the partitioner
    makes it for the operation that reads it.
    """
    return operation.source or _found(operation, _users) or _found(operation, _makers)


def _found(start: Operation, neighbours: Callable[[Operation], list[Operation]]) -> str:
    waiting, seen = deque(neighbours(start)), {id(start)}
    while waiting and len(seen) < _FARTHEST:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.source:
            return one.source
        waiting.extend(neighbours(one))
    return ""


def _users(operation: Operation) -> list[Operation]:
    return [user for result in operation.results for user in result.users]


def _makers(operation: Operation) -> list[Operation]:
    return [operand.producer for operand in operation.operands if operand.producer is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The regions of the operations of one block.

    Attributes:
      regions: by slot; a single one if everything that hides overlaps with the whole block.
    """

    regions: tuple[int, ...]
    slots: Slots | None = None

    def at(self, operation: Operation) -> int:
        """Returns the region of an operation."""
        return self.regions[0 if self.slots is None else self.slots.of[operation]]

    def beside(self, collective: Operation) -> int | None:
        """Returns the region in which a collective may hide; None if the step waits for it."""
        if self.slots is None:
            return self.regions[0]
        slot = self.slots.before(collective)
        return None if slot is None else self.regions[slot]


def has_slots(platform: str) -> bool:
    """Whether the platform's compiler overlaps a collective with a part of its block only."""
    return scheduling_of(platform).has_slots


def collective_term(
    operation: Operation, *, count: Sum, platform: str, places: Places, sizes: Mapping[str, int]
) -> CollectiveTerm | None:
    """Makes the term of one collective of the program; None if it moves nothing.

    Args:
      sizes: axis sizes of the program, for groups that are a part of an axis only.
    """
    axes: tuple[str, ...] = operation.attributes["axes"]
    if not axes or operation.attributes.get("group", 2) == 1:
        return None
    backend, kind = scheduling_of(platform), STABLEHLO[operation.name].name
    whole: Sum = operation.attributes.get(IN_RING, ())
    windowed = bool(whole)
    beside = places.beside(operation) if kind in backend.hides else None
    here = places.at(operation)
    product = operation.attributes.get(RING_OF)
    return CollectiveTerm(
        region=here if beside is None else beside,
        count=count,
        kind=kind,
        axes=axes,
        payload_bytes=multiplied(
            _payload(operation, widens=backend.widens), (_part_of_axes(operation, sizes),)
        ),
        hides=beside is not None,
        windowed=windowed,
        ring_region=None if product is None else places.at(product),
        whole_bytes=whole,
        intensity=operation.attributes.get(INTENSITY, ()),
        source=nearby_source(operation),
        operand=", ".join(map(_words, operation.operands)),
    )


def _part_of_axes(operation: Operation, sizes: Mapping[str, int]) -> Monomial:
    """Returns the share of a whole axis's traffic that groups along a part of the axis send.

    Pricing only knows whole axes. A reshape of 64 rows over eight devices to four microbatches of
    16 rows leaves two devices for each row, whose gradients are reduced in pairs.
    """
    group = operation.attributes.get("group", 0)
    along = math.prod(sizes.get(axis, 1) for axis in operation.attributes["axes"])
    if operation.attributes.get("exact", True) or not 1 < group < along:
        return Monomial(coefficient=1.0)
    kind = STABLEHLO[operation.name]
    sent, whole = (kind.wire_bytes((group * along) ** 2, size) for size in (group, along))
    return Monomial(coefficient=sent / whole)


def _payload(operation: Operation, *, widens: bool) -> Sum:
    """Returns the full array of one group; for collective-permute what one device sends."""
    # A gather makes the full array, with the padding of its parts.
    is_gather = operation.name == "all_gather"
    moved = operation.results if is_gather else operation.operands
    kind = STABLEHLO.get(operation.name)
    is_part = kind is not None and kind.is_sharded_before and not is_gather
    group = _group(operation) if is_part else Monomial(coefficient=1.0)
    return added(*(times(times(one.bytes, group), _widening(one, widens)) for one in moved))


def _group(operation: Operation) -> Monomial:
    if operation.attributes.get("exact", True):
        axes: Sequence[str] = operation.attributes["axes"]
        return Monomial(coefficient=1.0, powers=tuple((axis, 1) for axis in sorted(axes)))
    return Monomial(coefficient=float(operation.attributes["group"]))


_WIDE_BYTES = 4.0


def _widening(value: Value, widens: bool) -> Monomial:
    sent = sent_bytes_of_one(value.dtype, widens=widens)
    return Monomial(coefficient=sent / element_bytes(value.dtype))


def sent_bytes_of_one(dtype: str, *, widens: bool) -> float:
    """Returns the bytes that collectives send for an element.

    Args:
      widens: whether the platform sends narrow floats in a wider type.
    """
    bytes_of_one = element_bytes(dtype)
    if not widens or "f" not in dtype or bytes_of_one >= _WIDE_BYTES:
        return bytes_of_one
    # Eight bits become f16, and 16 bits f32 (jaxlib 0.12).
    return _WIDE_BYTES if bytes_of_one > 1 else _WIDE_BYTES / 2


def _words(value: Value) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def combined(
    block: Block,
    found: Sequence[tuple[Operation, CollectiveTerm]],
    platform: str,
    sizes: dict[str, int],
) -> list[CollectiveTerm]:
    """Makes one collective of several that do not depend on each other, as the compiler does.

    The bytes stay the same; fewer collectives are started. The sizes of the axes in `sizes` decide
    whether several are small enough to be one.

    Args:
      block: the block that contains them.
      found: its collectives in their order.
    """
    backend = scheduling_of(platform)
    if not backend.combined_bytes:
        return [term for _, term in found]
    needs = _Needs(block)
    groups: list[_Group] = []
    alike: dict[object, list[_Group]] = {}
    for operation, term in found:
        added_bytes = value_of(term.payload_bytes, sizes)
        can_join = term.kind in backend.combined_kinds and not term.windowed
        key = (term.kind, term.axes, term.hides) if can_join else operation
        for group in alike.setdefault(key, []):
            if group.takes(operation, added_bytes, backend, needs):
                break
        else:
            group = _Group()
            groups.append(group)
            alike[key].append(group)
        group.add(operation, term, added_bytes, needs)
    return [_merged(group.terms, sizes) for group in groups]


class _Group:
    """Collectives of one kind, over the same axes, that become one."""

    def __init__(self) -> None:
        self.terms: list[CollectiveTerm] = []
        self._dtypes: set[str] = set()
        self._bytes = 0.0
        self._bits = 0

    def takes(
        self, operation: Operation, added_bytes: float, backend: Scheduling, needs: _Needs
    ) -> bool:
        """Whether one more collective of the kind may join."""
        if needs.of(operation) & self._bits:
            return False
        if not backend.widens and {operation.operands[0].dtype} != self._dtypes:
            return False
        return self._bytes + added_bytes <= backend.combined_bytes

    def add(
        self, operation: Operation, term: CollectiveTerm, added_bytes: float, needs: _Needs
    ) -> None:
        self.terms.append(term)
        self._dtypes.add(operation.operands[0].dtype)
        self._bytes += added_bytes
        self._bits |= needs.bit(operation)


def _merged(terms: Sequence[CollectiveTerm], sizes: dict[str, int]) -> CollectiveTerm:
    """Makes the combined collective, with the name of the largest one at `sizes`."""
    if len(terms) == 1:
        return terms[0]
    largest = max(terms, key=lambda term: value_of(term.payload_bytes, sizes))
    return replace(
        largest,
        payload_bytes=added(*(one for term in terms for one in term.payload_bytes)),
        operand=f"{largest.operand} and {len(terms) - 1} more",
    )


class _Needs:
    """The collectives whose results each operation of a block needs.

    Each collective is a bit, so that a block of thousands is walked once.
    """

    def __init__(self, block: Block) -> None:
        self._bits: dict[Operation, int] = {}
        self._of: dict[Operation, int] = {}
        made = {result: one for one in block.operations for result in one.results}
        for operation in block.operations:
            needed = 0
            for value in (*operation.operands, *used_in(operation.bodies)):
                before = made.get(value)
                if before is not None:
                    needed |= self._of.get(before, 0) | self._bits.get(before, 0)
            self._of[operation] = needed
            if operation.name in STABLEHLO:
                self._bits[operation] = 1 << len(self._bits)

    def bit(self, operation: Operation) -> int:
        """Returns the bit of a collective; 0 if no operation can need it."""
        return self._bits.get(operation, 0)

    def of(self, operation: Operation) -> int:
        """Returns the bits of all collectives that an operation needs, directly or not."""
        return self._of.get(operation, 0)
