"""Small changes of a `Graph`, of which all rewrites consist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from automesh.ir.graph import Block, Graph, Operation, Value


def blocks(graph: Graph) -> Iterator[Block]:
    """Lists all blocks, outer ones first."""
    yield from _within(graph.top)


def _within(block: Block) -> Iterator[Block]:
    yield block
    for operation in block.operations:
        for body in operation.bodies:
            yield from _within(body)


def returned_values(graph: Graph) -> set[Value]:
    """Collects the values that some block returns."""
    return {value for block in blocks(graph) for value in block.returned}


def only_user(value: Value, returned: set[Value]) -> Operation | None:
    """Returns the only operation that reads a value; None if several do, or a block returns it."""
    return value.users[0] if len(value.users) == 1 and value not in returned else None


def set_operands(operation: Operation, operands: Iterable[Value]) -> None:
    """Gives an operation other operands."""
    for operand in operation.operands:
        operand.users.remove(operation)
    operation.operands = list(operands)
    for operand in operation.operands:
        operand.users.append(operation)


def take_result(operation: Operation, value: Value) -> None:
    """Makes an existing value the only result of an operation."""
    operation.results = [value]
    value.producer = operation


def like(
    value: Value, *, dtype: str | None = None, axes: tuple[tuple[str, ...], ...] | None = None
) -> Value:
    """Copies a value, with some attributes changed."""
    return Value(
        shape=value.shape,
        dtype=dtype or value.dtype,
        axes=value.axes if axes is None else axes,
        manual=value.manual,
        grown=value.grown,
        in_part=value.in_part if axes is None else (),
        is_constant=value.is_constant,
    )


def replace_value(graph: Graph, old: Value, new: Value) -> None:
    """Makes all operations and blocks read `new` instead of `old`."""
    replace_operands(old, new)
    replace_returned(graph, {old: new})


def replace_operands(old: Value, new: Value) -> None:
    """Makes all operations read `new` instead of `old`; blocks that return `old` still do."""
    for user in set(old.users):
        set_operands(user, [new if operand is old else operand for operand in user.operands])


def replace_returned(graph: Graph, replaced: Mapping[Value, Value]) -> None:
    """Makes all blocks return the new values instead of the old ones."""
    for block in blocks(graph):
        block.returned = [replaced.get(one, one) for one in block.returned]


def drop(block: Block, gone: set[Operation]) -> None:
    """Removes operations from a block; nothing may read their results any more."""
    for operation in gone:
        set_operands(operation, ())
    block.operations = [one for one in block.operations if one not in gone]


class Changes:
    """Changes of the operations of one block, which are made together.

    Each by itself would walk the whole block, so that a program of a thousand layers would be
    walked a thousand times.
    """

    def __init__(self, block: Block) -> None:
        self._block = block
        self._inside = set(block.operations)
        self._put: dict[Operation, list[Operation]] = {}

    def __contains__(self, operation: Operation) -> bool:
        """Whether an operation is in the block after the changes until now."""
        return operation in self._inside

    def drop(self, operation: Operation) -> None:
        """Removes an operation; nothing may read its results any more."""
        set_operands(operation, ())
        self._inside.discard(operation)

    def put(self, operation: Operation, instead: list[Operation]) -> None:
        """Replaces an operation of the block by others, which may include it."""
        self._put[operation] = instead
        self._inside.discard(operation)
        self._inside.update(instead)

    def apply(self) -> None:
        """Makes all changes."""
        self._block.operations = [
            one
            for operation in self._block.operations
            for one in self._put.get(operation, (operation,))
            if one in self._inside
        ]
