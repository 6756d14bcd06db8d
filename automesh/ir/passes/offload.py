"""Values that lie in host memory: what the program has moved there, and what it copies that into.

A program moves one value at a time (`annotate_device_placement`); where the moved values are
gathered in one array, as the saved activations of a loop over layers are, that array lies on the
host as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from automesh.ir.graph import Block, Graph, Operation, Value
from automesh.ir.op_kinds import SLICES, VIEWS
from automesh.ir.passes.edits import blocks, drop, replace_value

_HOST = "host"


def is_move(operation: Operation) -> bool:
    """Whether an operation only says in which memory its result lies."""
    return operation.name == "custom_call" and bool(operation.attributes.get("placement"))


def is_to_host(move: Operation) -> bool:
    """Of `is_move`: True towards the host, False towards the device."""
    return _HOST in move.attributes["placement"]


def computes_on_host(operation: Operation) -> bool:
    """Whether an operation works on values in host memory, which then the host has to do."""
    if operation.bodies or operation.name in _PASSING or is_move(operation) or _is_view(operation):
        return False
    return any(operand.on_host and not operand.is_constant for operand in operation.operands)


_PASSING = SLICES | {"dynamic_update_slice"}


def _is_view(operation: Operation) -> bool:
    """Whether results are operands seen in another way; of broadcasts those that add nothing."""
    operands, results = operation.operands, operation.results
    if operation.name == "broadcast_in_dim":
        return math.prod(operands[0].shape) == math.prod(results[0].shape)
    return operation.name in VIEWS and len(results) == len(operands)


def drop_moves(graph: Graph) -> None:
    """Takes out moves between memories that are one."""
    for block in blocks(graph):
        for move in [one for one in block.operations if is_move(one)]:
            replace_value(graph, move.results[0], move.operands[0])
            drop(block, {move})


def mark_host_values(graph: Graph) -> None:
    """Sets `Value.on_host` where a value lies in host memory."""
    _Marker(graph).run()


class _Marker:
    def __init__(self, graph: Graph) -> None:
        self._carried: dict[Value, list[tuple[Operation, int]]] = {}
        self._given: dict[Value, list[Value]] = {}  # By branches, to the results of their `case`.
        self._pending: list[Value] = []
        self._graph = graph
        self._moves: list[Operation] = []
        for operation in _within(graph.top):
            if operation.name == "while":
                body = operation.bodies[0]
                for number, argument in enumerate(body.arguments):
                    for value in {argument, body.returned[number], operation.results[number]}:
                        self._carried.setdefault(value, []).append((operation, number))
            if operation.name == "case":
                for body in operation.bodies:
                    for value, result in zip(body.returned, operation.results, strict=True):
                        self._given.setdefault(value, []).append(result)
            if is_move(operation):
                self._moves.append(operation)

    def run(self) -> None:
        for position in self._graph.host:
            self._mark(self._graph.top.arguments[position])
        for move in self._moves:
            if is_to_host(move):
                self._mark(move.results[0])
        while self._pending:
            self._spread(self._pending.pop())

    def _mark(self, value: Value) -> None:
        if not value.on_host:
            value.on_host = True
            self._pending.append(value)

    def _mark_all(self, values: Iterable[Value]) -> None:
        for value in values:
            self._mark(value)

    def _spread(self, value: Value) -> None:
        for user in value.users:
            places = [n for n, operand in enumerate(user.operands) if operand is value]
            if _is_view(user):
                self._mark_all(user.results[place] for place in places)
            elif user.name in SLICES and user.operands[0] is value:
                self._mark(user.results[0])
            elif user.name == "dynamic_update_slice" and value in user.operands[:2]:
                self._mark(user.results[0])
                self._mark_start(user.operands[0])
            elif user.name == "while":
                self._mark_all(user.bodies[0].arguments[place] for place in places)
            elif user.name == "case":
                for body in user.bodies:
                    first = len(user.operands) - len(body.arguments)
                    self._mark_all(body.arguments[n - first] for n in places if n >= first)
        self._mark_all(self._given.get(value, ()))
        for loop, number in self._carried.get(value, ()):
            self._mark(loop.bodies[0].arguments[number])
            self._mark(loop.results[number])
            self._mark_start(loop.operands[number])

    def _mark_start(self, value: Value) -> None:
        """The array that values are copied into: made for this, or carried by a loop."""
        producer = value.producer
        if producer is None:
            if value in self._carried:
                self._mark(value)
        elif value.is_constant:
            value.on_host = True  # It is made wherever it is used, elsewhere in device memory.
        elif producer.name in ("while", "dynamic_update_slice"):
            self._mark(value)
        elif _is_view(producer):
            self._mark(value)
            self._mark_start(producer.operands[producer.results.index(value)])


def _within(block: Block) -> Iterator[Operation]:
    for operation in block.operations:
        yield operation
        for body in operation.bodies:
            yield from _within(body)
