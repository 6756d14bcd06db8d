"""Which arrays of the state a step needs whole, as they come in and as they go out.

Such an array is a factor by which something larger is multiplied: its parts would have to be
gathered once for the product with the old one, and once more for the product with the new one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from automesh.ir.graph import Graph, Value
from automesh.ir.op_kinds import PRODUCTS, VIEWS
from automesh.ir.passes.edits import blocks

# Operations that read all elements of an array for each of their results.
_READERS = PRODUCTS | {"custom_call", "cholesky", "triangular_solve"}
# Their results are operands in another form, or rows of them.
_FORMS = VIEWS | {"transpose", "convert", "dynamic_slice", "slice"}
_MOST = 256  # Values that are looked at.
_FARTHEST = 4096  # Values that are made of one.
# A factor has at most this part of the rows or columns of what it multiplies.
_THIN = 0.25


def results_of_loops(graph: Graph) -> dict[Value, list[Value]]:
    """Returns, for each value that the body of a loop returns, the results that it becomes."""
    found: dict[Value, list[Value]] = {}
    for block in blocks(graph):
        for loop in block.operations:
            if loop.name == "while":
                for inside, result in zip(loop.bodies[0].returned, loop.results, strict=False):
                    found.setdefault(inside, []).append(result)
    return found


def is_factor_read_twice(
    before: Value,
    after: Value,
    kept: Collection[Value],
    of_loops: Mapping[Value, Sequence[Value]],
) -> bool:
    """Whether products read a thin matrix of the state, and also the one that replaces it to make
    arrays of the state.

    A step that evaluates its loss once more with the new parameters makes no state of them.

    Args:
      kept: the results of the step that are state.
      of_loops: see `results_of_loops`.
    """
    sizes = before.shape[-2:]
    if len(sizes) < 2 or min(sizes) > _THIN * max(sizes):
        return False
    return any(True for _ in _readers([before])) and any(
        _is_kept(made, kept, of_loops) for made in _readers(_forms_of(after))
    )


def _is_kept(
    values: list[Value], kept: Collection[Value], of_loops: Mapping[Value, Sequence[Value]]
) -> bool:
    """Whether arrays of the state are computed from some values, but not from a number alone that
    these give, such as a loss."""
    waiting, seen = list(values), set[Value]()
    while waiting and len(seen) < _FARTHEST:
        value = waiting.pop()
        if value in seen or not value.shape:
            continue
        if value in kept:
            return True
        seen.add(value)
        waiting += of_loops.get(value, ())
        for user in value.users:
            waiting += user.results
    return False


def _readers(values: list[Value]) -> Iterator[list[Value]]:
    """Yields the results of operations that read one of the values, or a form of it, as a whole. Of
    those in a loop they are the results of the loop."""
    waiting: list[tuple[Value, list[Value]]] = [(one, []) for one in values]
    seen = set[Value]()
    while waiting and len(seen) < _MOST:
        value, of_loop = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        for user in value.users:
            if user.name in _READERS:
                yield of_loop or user.results
            elif user.name == "while":
                body = user.bodies[0]
                waiting += [
                    (inside, of_loop or user.results)
                    for operand, inside in zip(user.operands, body.arguments, strict=True)
                    if operand is value
                ]
            elif user.name in VIEWS and len(user.operands) == len(user.results):
                waiting.append((user.results[user.operands.index(value)], of_loop))
            elif user.name in _FORMS and user.operands[0] is value:
                waiting += [(one, of_loop) for one in user.results]


def _forms_of(value: Value) -> list[Value]:
    """Returns a value and what it is another form of, also the rows that a loop writes into it."""
    waiting, found = [value], list[Value]()
    while waiting and len(found) < _MOST:
        value = waiting.pop()
        if value in found:
            continue
        found.append(value)
        made = value.producer
        if made is None:
            continue
        if made.name == "while":
            waiting.append(made.bodies[0].returned[made.results.index(value)])
        elif made.name == "dynamic_update_slice":
            waiting += made.operands[:2]
        elif made.name in VIEWS and len(made.operands) == len(made.results):
            waiting.append(made.operands[made.results.index(value)])
        elif made.name in _FORMS:
            waiting.append(made.operands[0])
    return found
