"""Moves reductions that a loop only adds up behind the loop."""

from __future__ import annotations

from collections.abc import Collection

from automesh.ir.graph import Block, Graph, Operation, Value
from automesh.ir.op_kinds import VIEWS
from automesh.ir.passes.edits import (
    blocks,
    drop,
    like,
    only_user,
    replace_operands,
    replace_returned,
    returned_values,
)

# Operations that may be between the reduction and the sum, as they act on a sum as on its parts.
# Arithmetic is not among them: `gradient / microbatches` keeps the reduction in the loop.
_BETWEEN = VIEWS | {"convert", "transpose"}


def sink_reductions(graph: Graph, *, kept_inside: Collection[str] = ()) -> None:
    """Moves all-reduces out of loops that only add their results to a carried value.

    Inner loops first, so that a sum of sums moves out of both.

    Args:
      kept_inside: operations whose reduced results stay inside if they are added as they are.
    """
    for block in reversed(list(blocks(graph))):
        for loop in [one for one in block.operations if one.name == "while"]:
            for operation in list(loop.bodies[0].operations):
                if operation.name == "all_reduce" and _is_sum(operation):
                    if _is_added_directly(graph, operation, kept_inside):
                        continue
                    number = _added_to(graph, operation, loop)
                    if number is not None:
                        _sink(graph, block, loop, operation, number)


def _is_added_directly(graph: Graph, reduction: Operation, made_by: Collection[str]) -> bool:
    made = reduction.operands[0].producer
    if made is None or made.name not in made_by:
        return False
    user = only_user(reduction.results[0], returned_values(graph))
    return user is not None and user.name == "add"


def _is_sum(reduction: Operation) -> bool:
    """Whether a collective of the partitioner adds up parts."""
    if reduction.attributes.get("manual") or reduction.attributes.get("reducer", "add") != "add":
        return False
    # A reduction within the device comes first, and is of the same kind.
    made = reduction.operands[0].producer
    return made is None or made.attributes.get("reducer", "add") == "add"


def _added_to(graph: Graph, reduction: Operation, loop: Operation) -> int | None:
    """Returns the index of the carried value to which a reduction is added.

    None: the reduction is also used in another way.
    """
    body, returned = loop.bodies[0], returned_values(graph)
    value = reduction.results[0]
    while True:
        user = only_user(value, returned)
        if user is None or user not in body.operations:
            return None
        if user.name == "add":
            break
        if user.name not in _BETWEEN:
            return None
        value = user.results[0]
    for number, carried in enumerate(body.arguments):
        if (
            carried in user.operands
            and only_user(carried, returned) is user
            and body.returned[number] is user.results[0]
            and not user.results[0].users
        ):
            return number
    return None


def _sink(graph: Graph, block: Block, loop: Operation, reduction: Operation, number: int) -> None:
    replace_operands(reduction.results[0], reduction.operands[0])
    attributes, source = dict(reduction.attributes), reduction.source
    drop(loop.bodies[0], {reduction})
    total: Value = loop.results[number]
    reduced = like(total)
    replace_operands(total, reduced)
    replace_returned(graph, {total: reduced})
    behind = Operation(
        name="all_reduce",
        operands=[total],
        results=[reduced],
        attributes=attributes,
        source=source,
    )
    block.operations.insert(block.operations.index(loop) + 1, behind)
