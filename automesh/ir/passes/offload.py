"""Marks values in host memory: those that the program moves there, and copies of them.

A program moves one value at a time (`annotate_device_placement`). If the moved values are collected
in one array, such as the saved activations of a loop over layers, the whole array is on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from automesh.ir.graph import Graph, Operation, Value, operations_in
from automesh.ir.op_kinds import SLICES, VIEWS
from automesh.ir.passes.edits import blocks, drop, replace_value

_HOST = "host"


def is_move(operation: Operation) -> bool:
    """Whether an operation only states the memory of its result."""
    return operation.name == "custom_call" and bool(operation.attributes.get("placement"))


def is_to_host(move: Operation) -> bool:
    """Whether a move (see `is_move`) goes to the host, not to the device."""
    return _HOST in move.attributes["placement"]


def computes_on_host(operation: Operation) -> bool:
    """Whether an operation works on values in host memory, so that the host must do it."""
    if operation.bodies or operation.name in _PASSING or is_move(operation) or _is_view(operation):
        return False
    return any(operand.on_host and not operand.is_constant for operand in operation.operands)


_PASSING = SLICES | {"dynamic_update_slice"}


def _is_view(operation: Operation) -> bool:
    """Whether results are views of operands; for broadcasts, those that repeat nothing."""
    operands, results = operation.operands, operation.results
    if operation.name == "broadcast_in_dim":
        return math.prod(operands[0].shape) == math.prod(results[0].shape)
    return operation.name in VIEWS and len(results) == len(operands)


def drop_moves(graph: Graph) -> None:
    """Removes moves between two names of the same memory."""
    for block in blocks(graph):
        for move in [one for one in block.operations if is_move(one)]:
            replace_value(graph, move.results[0], move.operands[0])
            drop(block, {move})


def mark_host_values(graph: Graph) -> None:
    """Sets `Value.on_host` for values in host memory."""
    _Marker(graph).run()


class _Marker:
    def __init__(self, graph: Graph) -> None:
        self._carried: dict[Value, list[tuple[Operation, int]]] = {}
        self._given: dict[Value, list[Value]] = {}  # By branches, to the results of their `case`.
        self._pending: list[Value] = []
        self._graph = graph
        self._moves: list[Operation] = []
        for operation in operations_in(graph.top):
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
        """Marks the array that values are copied into: made for this, or carried by a loop."""
        producer = value.producer
        if producer is None:
            if value in self._carried:
                self._mark(value)
        elif value.is_constant:
            value.on_host = True  # Other uses make it again in device memory.
        elif producer.name in ("while", "dynamic_update_slice"):
            self._mark(value)
        elif _is_view(producer):
            self._mark(value)
            self._mark_start(producer.operands[producer.results.index(value)])
