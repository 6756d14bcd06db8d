"""Which part of a block a collective runs beside.

TPU compilers fuse a gather with the kernels that stand between the first use of the gather before
it and its own (54 schedules of libtpu 0.0.42 for v5e): one is on its way at a time, and what finds
no matrix product there is waited for. Such a part is a slot.

    slots = slots_of(block)
    slots.of[operation]       # the slot that an operation stands in
    slots.before(gather)      # the slot that a gather hides in; None if nothing there hides it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from automesh.ir.graph import Block, Operation, Value
from automesh.ir.op_kinds import COLLECTIVES, PRODUCTS, VIRTUAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """The slots of one block, numbered from 0.

    Attributes:
      count: how many there are.
      of: by operation, the slot that it stands in.
    """

    count: int
    of: dict[Operation, int]
    _order: dict[Operation, int]
    _uses: dict[Operation, int]
    _products: tuple[int, ...]
    _starts: tuple[int, ...]

    def before(self, gather: Operation) -> int | None:
        """The slot that ends where a gather is first used; None if no product there hides it."""
        use = self._uses[gather]
        number = max((n for n, start in enumerate(self._starts) if start < use), default=0)
        ready = max((self._order[one] for one in _producers(gather, self._order)), default=-1)
        begins = max(self._starts[number], ready + 1)
        return number if any(begins <= place < use for place in self._products) else None


def slots_of(block: Block) -> Slots:
    """Cuts a block where a gather is used for the first time, and after every loop."""
    order = {operation: place for place, operation in enumerate(block.operations)}
    end = len(block.operations)
    uses = {
        operation: min(
            (order[user] for user in _users(operation.results) if user in order), default=end
        )
        for operation in block.operations
        if operation.name in COLLECTIVES
    }
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
        _order=order,
        _uses=uses,
        _products=tuple(place for one, place in order.items() if one.name in PRODUCTS),
        _starts=starts,
    )


def _users(values: list[Value]) -> Iterator[Operation]:
    """What uses some values, as they are or seen in another way."""
    for value in values:
        for user in value.users:
            if user.name in VIRTUAL:
                yield from _users(user.results)
            else:
                yield user


def _producers(operation: Operation, inside: dict[Operation, int]) -> Iterator[Operation]:
    """The kernels of the block that make what an operation reads."""
    for operand in operation.operands:
        producer = operand.producer
        if producer is None or producer not in inside:
            continue
        if producer.name in VIRTUAL:
            yield from _producers(producer, inside)
        else:
            yield producer
