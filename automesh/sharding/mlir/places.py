"""Whole numbers that a program computes from the device's place in the mesh (jax's MLIR bindings).

`jax.lax.axis_index` in `shard_map` is arithmetic on the number of the device. A loop over the parts
of a sequence that come before a device's own runs longer on some devices than on others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from automesh.ir.op_kinds import VIEWS

_SPLAT = re.compile(r"dense<(-?\d+)>")
# In the text of a mesh: `<["dp"=4, "tp"=2]>`.
_SIZE = re.compile(r'"[^"]*"=(\d+)')
_DEEPEST = 64  # Operations between a number and what it is computed from.
_ARITHMETIC: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "remainder": lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "minimum": min,
    "maximum": max,
    "negate": lambda a: -a,
    "convert": lambda a: a,
    "clamp": lambda low, a, high: min(max(a, low), high),
}
_SAME = VIEWS | {"broadcast_in_dim", "reshard", "sharding_constraint"}


class NoNumber(Exception):
    """The value depends on data, or on an operation that is not computed here."""


def devices_of(operation: Any) -> int:
    """Returns how many devices the mesh of the program around an operation has; 1 without one."""
    while (parent := operation.parent) is not None:
        operation = getattr(parent, "operation", parent)
    counts = [1]
    for one in operation.regions[0].blocks[0].operations:
        if one.operation.name == "sdy.mesh":
            sizes = _SIZE.findall(str(one.operation.attributes["mesh"]))
            counts.append(math.prod(map(int, sizes)))
    return max(counts)


def on_each_device(loop: Any, value: Any, count: int) -> Iterator[int]:
    """Computes one side of a loop's condition before the first turn, on each of `count` devices.

    It is the loop's counter, or what is the same in every turn.

    Raises:
      NoNumber: it depends on more than the place of the device, or changes in another way.
    """
    value = _behind_views(value)
    number = _place_in(value.owner, value) if _is_argument_of(loop, value) else None
    for place in range(count):
        if number is None:
            yield _number(loop, value, place, _DEEPEST)
        else:
            yield _number(loop, loop.operands[number], place, _DEEPEST)


def _behind_views(value: Any) -> Any:
    """Returns what a value is a view or a conversion of."""
    while hasattr(value.owner, "operands"):
        made = getattr(value.owner, "operation", value.owner)
        if str(made.name).partition(".")[2] not in _SAME | {"convert"} or len(made.operands) != 1:
            return value
        value = made.operands[0]
    return value


def _is_argument_of(loop: Any, value: Any) -> bool:
    """Whether a value is an argument of the loop's condition."""
    return not hasattr(value.owner, "operands") and _around(value.owner) == loop


def _around(block: Any) -> Any:
    parent = getattr(block, "owner", None)
    return getattr(parent, "operation", parent)


def _place_in(block: Any, value: Any) -> int:
    return next(number for number, one in enumerate(block.arguments) if one == value)


def _number(loop: Any, value: Any, place: int, depth: int) -> int:
    if depth <= 0:
        raise NoNumber
    owner = value.owner
    if not hasattr(owner, "operands"):
        return _of_argument(loop, value, place, depth)
    made = getattr(owner, "operation", owner)
    name = str(made.name).partition(".")[2]
    if name == "constant":
        if found := _SPLAT.search(str(made.attributes["value"])):
            return int(found[1])
        raise NoNumber
    if name == "partition_id":
        return place
    operands = list(made.operands)
    if name in _SAME and len(operands) == 1:
        return _number(loop, operands[0], place, depth - 1)
    compute = _ARITHMETIC.get(name)
    if compute is None:
        raise NoNumber
    try:
        return compute(*(_number(loop, one, place, depth - 1) for one in operands))
    except ZeroDivisionError:
        raise NoNumber from None


def _of_argument(loop: Any, value: Any, place: int, depth: int) -> int:
    """Follows an argument of a block to what is passed to it: into the condition of the loop, if
    all turns get the same, or into a manual region around it."""
    block = value.owner
    around, number = _around(block), _place_in(block, value)
    if around is None:
        raise NoNumber
    if around == loop:
        body = loop.regions[1].blocks[0]
        returned = body.operations[len(body.operations) - 1].operation.operands[number]
        if returned != body.arguments[number]:
            raise NoNumber
    elif around.name != "sdy.manual_computation":
        raise NoNumber
    return _number(loop, around.operands[number], place, depth - 1)
