"""Where an operation that the partitioner has put in belongs in the user's code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from automesh.ir.graph import Operation

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
    return [one.producer for one in operation.operands if one.producer is not None]
