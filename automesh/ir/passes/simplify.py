"""Rewrites without communication: equal work is done once, useless work never."""

from __future__ import annotations

from automesh.ir.graph import Block, Graph, Operation, Value, used_in
from automesh.ir.op_kinds import COLLECTIVES, PURE
from automesh.ir.passes.edits import (
    blocks,
    drop,
    replace_operands,
    replace_returned,
    replace_value,
    returned_values,
    set_operands,
)

# Of a collective that is not shared: XLA's partitioner makes one for each operation that needs it.
OWN_CHANNEL = "own_channel"
# Have effects besides their results.
EFFECTS = frozenset(("custom_call", "infeed", "outfeed", "send", "recv"))


def share_equal(graph: Graph) -> None:
    """Merges equal operations with the same operands in one block.

    Collectives of equal arrays that were computed apart stay apart: the partitioner keeps what it
    made of one array, but makes a channel for each of two, and only later does it share their
    equal parts.
    """
    replaced: dict[Value, Value] = {}
    for block in blocks(graph):
        first: dict[object, Operation] = {}
        gone: set[Operation] = set()
        moved = {one: tuple(one.operands) for one in block.operations if one.name in COLLECTIVES}
        on_the_way = {result for one in moved for result in one.results}
        for operation in block.operations:
            if operation.name not in PURE or len(operation.results) != 1:
                continue
            # What moves in several steps is one array on its way.
            operands = tuple(
                replaced.get(one, one) if one in on_the_way else one
                for one in moved.get(operation, operation.operands)
            )
            known = first.setdefault(_key(operation, operands), operation)
            if known is not operation:
                replace_operands(operation.results[0], known.results[0])
                replaced[operation.results[0]] = known.results[0]
                gone.add(operation)
        drop(block, gone)
    # No operation that stays is replaced by another one: one pass suffices.
    replace_returned(graph, replaced)


def _key(operation: Operation, operands: tuple[Value, ...]) -> object:
    result = operation.results[0]
    # `splat` is None for every array whose elements differ.
    attributes = operation.attributes
    is_unique = attributes.get("splat", 0) is None or OWN_CHANNEL in attributes
    return (
        operation.name,
        operands,
        result.shape,
        result.dtype,
        result.axes,
        repr(sorted(operation.attributes.items())),
        operation if is_unique else None,
    )


def drop_unused(graph: Graph) -> None:
    """Drops operations whose results nothing reads."""
    returned = returned_values(graph)
    _drop_unused(graph.top, returned)


def _drop_unused(block: Block, returned: set[Value]) -> None:
    gone: set[Operation] = set()
    for operation in reversed(block.operations):
        if operation.name in EFFECTS or _is_read(operation, returned):
            for body in operation.bodies:
                _drop_unused(body, returned)
        elif not operation.bodies:
            set_operands(operation, ())  # Drops what only it read, too.
            gone.add(operation)
    if gone:
        drop(block, gone)


def _is_read(operation: Operation, returned: set[Value]) -> bool:
    return any(result.users or result in returned for result in operation.results)


# Rewrites of loops: drops loops that never run, and carries that nothing reads.


def simplify_loops(graph: Graph) -> None:
    """Drops loops that never run or whose results nothing reads, and carries that feed nothing.

    Residuals that a traced backward pass stacks and never reads are such carries. Loops of one
    trip stay: at other axis sizes they may run more often.
    """
    _drop_loops_without_trips(graph)
    while True:
        drop_unused(graph)
        returned = returned_values(graph)
        if not sum(_prune(block, returned) for block in blocks(graph)):
            return


def _drop_loops_without_trips(graph: Graph) -> None:
    for block in list(blocks(graph)):
        for operation in list(block.operations):
            if operation.name == "while" and operation.trips == 0 and not operation.times:
                for before, after in zip(operation.operands, operation.results, strict=True):
                    replace_value(graph, after, before)
                _drop_loop(block, operation)


def _drop_loop(block: Block, loop: Operation) -> None:
    for inner in _all_operations(loop.bodies[0]):
        set_operands(inner, ())
    drop(block, {loop})


def _prune(block: Block, returned: set[Value]) -> int:
    """Removes unread carries from the loops of one block; returns the number of changed loops."""
    pruned = 0
    for loop in list(block.operations):
        if loop.name != "while" or _has_effects(loop):
            continue
        if not any(result.users or result in returned for result in loop.results):
            _drop_loop(block, loop)
            pruned += 1
        elif dead := set(range(len(loop.results))) - _needed(loop, returned):
            _remove(loop, dead)
            pruned += 1
    return pruned


def _has_effects(loop: Operation) -> bool:
    return any(
        operation.name in EFFECTS for body in loop.bodies for operation in _all_operations(body)
    )


def _needed(loop: Operation, returned: set[Value]) -> set[int]:
    """Returns the positions of the carries that something reads, behind the loop or in it."""
    (body,) = loop.bodies
    position = {argument: number for number, argument in enumerate(body.arguments)}
    needed = {
        number
        for number, result in enumerate(loop.results)
        # The loop's condition is unknown here, so that a value which may count its trips stays.
        if result.users or result in returned or not result.shape
    }
    seen: set[Value] = set()
    waiting = [body.returned[number] for number in needed]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        number = position.get(value)
        if number is not None and number not in needed:
            needed.add(number)
            waiting.append(body.returned[number])
        if value.producer is not None:
            waiting += (*value.producer.operands, *used_in(value.producer.bodies))
    return needed


def _all_operations(body: Block) -> list[Operation]:
    found: list[Operation] = []
    for operation in body.operations:
        found.append(operation)
        for inner in operation.bodies:
            found.extend(_all_operations(inner))
    return found


def _remove(loop: Operation, dead: set[int]) -> None:
    (body,) = loop.bodies
    kept = [number for number in range(len(loop.results)) if number not in dead]
    set_operands(loop, [loop.operands[number] for number in kept])
    loop.results = [loop.results[number] for number in kept]
    body.arguments = [body.arguments[number] for number in kept]
    body.returned = [body.returned[number] for number in kept]
