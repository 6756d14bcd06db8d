"""Which arrays of the state a step needs whole, as they come in and as they go out.

Such an array is a factor by which something larger is multiplied: its parts would have to be
gathered once for the product with the old one, and once more for the product with the new one.
"""

from __future__ import annotations

from automesh.ir.graph import Value
from automesh.ir.op_kinds import PRODUCTS, VIEWS

# Operations that read all elements of an array for each of their results.
_READERS = PRODUCTS | {"custom_call", "cholesky", "triangular_solve"}
# Their results are operands in another form, or rows of them.
_FORMS = VIEWS | {"transpose", "convert", "dynamic_slice", "slice"}
_MOST = 256  # Values that are looked at.


def is_read_whole_twice(before: Value, after: Value) -> bool:
    """Whether products read an array of the state and also the one that replaces it."""
    return _is_read_whole([before]) and _is_read_whole(_forms_of(after))


def _is_read_whole(values: list[Value]) -> bool:
    """Whether an operation reads one of the values, or a form of it, as a whole."""
    waiting, seen = list(values), set[Value]()
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        for user in value.users:
            if user.name in _READERS:
                return True
            if user.name == "while":
                body = user.bodies[0]
                waiting += [
                    inside
                    for operand, inside in zip(user.operands, body.arguments, strict=True)
                    if operand is value
                ]
            elif user.name in VIEWS and len(user.operands) == len(user.results):
                waiting.append(user.results[user.operands.index(value)])
            elif user.name in _FORMS and user.operands[0] is value:
                waiting += user.results
    return False


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
