"""Collectives of a program as `CollectiveTerm`s: what each moves, where, and what hides it.

TPU compilers fuse a gather with the kernels that stand between the first use of the gather before
it and its own (54 schedules of libtpu 0.0.42 for v5e): one is on its way at a time, and what finds
no matrix product there is waited for. Such a part of a block is a slot.

    slots = slots_of(block)
    slots.of[operation]       # the slot that an operation stands in
    slots.before(gather)      # the slot that a gather hides in; None if nothing there hides it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from automesh.collectives import STABLEHLO
from automesh.cost.terms import CollectiveTerm, Monomial, Sum, value_of
from automesh.ir.graph import Block, Operation, Value, added, element_bytes, times, used_in
from automesh.ir.op_kinds import COLLECTIVES, PRODUCTS, VIRTUAL
from automesh.ir.passes.windowed import IN_RING, INTENSITY, RING_OF
from automesh.platforms import scheduling_of
from automesh.platforms.platform import Scheduling


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
        ready = max((self._order[one] for one in _kernels_behind(gather, self._order)), default=-1)
        begins = max(self._starts[number], ready + 1)
        return number if any(begins <= place < use for place in self._products) else None


def slots_of(block: Block) -> Slots:
    """Cuts a block where a gather is used for the first time, and after every loop."""
    order = {operation: place for place, operation in enumerate(block.operations)}
    end = len(block.operations)
    uses = {
        operation: min(
            (order[user] for user in _kernels_using(operation.results) if user in order),
            default=end,
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


def _kernels_using(values: Sequence[Value]) -> Iterator[Operation]:
    """What uses some values, as they are or seen in another way."""
    return _beyond_views([user for value in values for user in value.users], _users)


def _kernels_behind(operation: Operation, inside: dict[Operation, int]) -> Iterator[Operation]:
    """The kernels of the block that make what an operation reads."""

    def makers(one: Operation) -> list[Operation]:
        return [producer for producer in _makers(one) if producer in inside]

    return _beyond_views(makers(operation), makers)


def _beyond_views(
    first: Sequence[Operation], following: Callable[[Operation], list[Operation]]
) -> Iterator[Operation]:
    """The nearest operations that are more than a view of their operands, each once.

    Views may come together again and again: every path on its own would be two to the power of
    their number.

    Args:
      first: where to begin.
      following: the operations beyond a view.
    """
    waiting, seen = list(first), set(first)
    while waiting:
        one = waiting.pop()
        if one.name not in VIRTUAL:
            yield one
            continue
        for other in following(one):
            if other not in seen:
                seen.add(other)
                waiting.append(other)


# Where an operation that the partitioner has put in belongs in the user's code.

_FARTHEST = 64  # operations looked at; beyond, a line says little about the operation


def nearby_source(operation: Operation) -> str:
    """Its own source line; else that of the first use of its results, else of what made its input.

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
    """Regions of the operations of one block.

    Attributes:
      regions: by slot; one alone where all that hides runs beside all of the block.
    """

    regions: tuple[int, ...]
    slots: Slots | None = None

    def at(self, operation: Operation) -> int:
        """The region that an operation stands in."""
        return self.regions[0 if self.slots is None else self.slots.of[operation]]

    def beside(self, collective: Operation) -> int | None:
        """The region that a collective may hide in; None if it is waited for."""
        if self.slots is None:
            return self.regions[0]
        slot = self.slots.before(collective)
        return None if slot is None else self.regions[slot]


def has_slots(platform: str) -> bool:
    """Whether the platform's compiler hides a collective beside a part of its block."""
    return scheduling_of(platform).has_slots


def collective_term(
    operation: Operation, *, count: Sum, platform: str, places: Places
) -> CollectiveTerm | None:
    """One collective of the program; None if it moves nothing."""
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
        payload_bytes=_payload(operation, widens=backend.widens),
        hides=beside is not None,
        windowed=windowed,
        ring_region=None if product is None else places.at(product),
        whole_bytes=whole,
        intensity=operation.attributes.get(INTENSITY, ()),
        source=nearby_source(operation),
        operand=", ".join(map(_words, operation.operands)),
    )


def _payload(operation: Operation, *, widens: bool) -> Sum:
    """The full array of one group; of collective-permute what one device sends."""
    # What is gathered is the full array, with the padding of its parts.
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


def _widening(value: Value, widens: bool) -> Monomial:
    is_narrow = "f" in value.dtype and element_bytes(value.dtype) < 4
    return Monomial(coefficient=4.0 / element_bytes(value.dtype) if widens and is_narrow else 1.0)


def _words(value: Value) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def combined(
    block: Block,
    found: Sequence[tuple[Operation, CollectiveTerm]],
    platform: str,
    sizes: dict[str, int],
) -> list[CollectiveTerm]:
    """Makes one collective of several that do not depend on each other, as the compiler does.

    Bytes stay what they are; fewer are started. Whether they are small enough is asked at `sizes`.

    Args:
      block: the block that they stand in.
      found: its collectives in their order.
    """
    backend = scheduling_of(platform)
    if not backend.combined_bytes:
        return [term for _, term in found]
    after = _Dependence(block)
    groups: list[list[tuple[Operation, CollectiveTerm]]] = []
    for operation, term in found:
        for group in groups:
            if _fits(group, operation, term, backend, after, sizes):
                group.append((operation, term))
                break
        else:
            groups.append([(operation, term)])
    return [_one([term for _, term in group], sizes) for group in groups]


def _fits(
    group: list[tuple[Operation, CollectiveTerm]],
    operation: Operation,
    term: CollectiveTerm,
    backend: Scheduling,
    after: _Dependence,
    sizes: dict[str, int],
) -> bool:
    first = group[0][1]
    if term.kind not in backend.combined_kinds or term.windowed or first.windowed:
        return False
    if (first.kind, first.axes, first.hides) != (term.kind, term.axes, term.hides):
        return False
    dtypes = {one.operands[0].dtype for one, _ in (*group, (operation, term))}
    if len(dtypes) > 1 and not backend.widens:
        return False
    total = sum(value_of(one.payload_bytes, sizes) for _, one in group)
    if total + value_of(term.payload_bytes, sizes) > backend.combined_bytes:
        return False
    return not any(after.depends(operation, one) for one, _ in group)


def _one(terms: Sequence[CollectiveTerm], sizes: dict[str, int]) -> CollectiveTerm:
    """The combined collective, named after the largest at `sizes`."""
    if len(terms) == 1:
        return terms[0]
    largest = max(terms, key=lambda term: value_of(term.payload_bytes, sizes))
    return replace(
        largest,
        payload_bytes=added(*(one for term in terms for one in term.payload_bytes)),
        operand=f"{largest.operand} and {len(terms) - 1} more",
    )


class _Dependence:
    """Which operations of a block need the results of which collectives."""

    def __init__(self, block: Block) -> None:
        self._needs: dict[Operation, set[Operation]] = {}
        made = {result: one for one in block.operations for result in one.results}
        for operation in block.operations:
            needs: set[Operation] = set()
            for value in (*operation.operands, *used_in(operation.bodies)):
                before = made.get(value)
                if before is not None:
                    needs |= self._needs.get(before, set())
                    if before.name in STABLEHLO:
                        needs.add(before)
            self._needs[operation] = needs

    def depends(self, later: Operation, earlier: Operation) -> bool:
        return earlier in self._needs.get(later, ())
