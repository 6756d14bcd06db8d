"""Rewrites that have nothing to do with communication: equal work once, useless work never."""

from __future__ import annotations

from automesh.ir.graph import Block, Graph, Operation, Value
from automesh.ir.op_kinds import PURE
from automesh.ir.passes.edits import blocks, drop, replace_value, returned_values

# Have effects besides their results.
EFFECTS = frozenset(("custom_call", "infeed", "outfeed", "send", "recv"))


def share_equal(graph: Graph) -> None:
    """Lets operations that do the same with the same operands in one block run once."""
    for block in blocks(graph):
        first: dict[object, Operation] = {}
        gone: set[Operation] = set()
        for operation in block.operations:
            if operation.name not in PURE or len(operation.results) != 1:
                continue
            known = first.setdefault(_key(operation), operation)
            if known is not operation:
                replace_value(graph, operation.results[0], known.results[0])
                gone.add(operation)
        drop(block, gone)


def _key(operation: Operation) -> object:
    result = operation.results[0]
    # `splat` is None for every array whose elements differ.
    unique = operation if operation.attributes.get("splat", 0) is None else None
    return (
        operation.name,
        tuple(operation.operands),
        result.shape,
        result.dtype,
        result.axes,
        repr(sorted(operation.attributes.items())),
        unique,
    )


def drop_unused(graph: Graph) -> None:
    """Drops operations whose results nothing reads."""
    returned = returned_values(graph)
    _drop_unused(graph.top, returned)


def _drop_unused(block: Block, returned: set[Value]) -> None:
    for operation in reversed(list(block.operations)):
        if operation.name in EFFECTS or _is_read(operation, returned):
            for body in operation.bodies:
                _drop_unused(body, returned)
        elif not operation.bodies:
            drop(block, {operation})


def _is_read(operation: Operation, returned: set[Value]) -> bool:
    return any(result.users or result in returned for result in operation.results)
