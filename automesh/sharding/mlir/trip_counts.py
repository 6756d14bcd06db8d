"""How often a loop runs, where its condition and its step are constants (jax)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from automesh.ir.graph import Value

_SPLAT = re.compile(r"dense<(-?\d+)>")
_CONSTANTS = ("stablehlo.constant", "sdy.constant")


def trips(loop: Any, environment: Mapping[Any, Value]) -> int | None:
    """Executions of the body of a `stablehlo.while`, or None if that is not known beforehand.

    Args:
      loop: the operation; its counter is compared with a constant and moved on by another.
      environment: what the values of the surrounding block have become.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    compared = _owner(condition.operations[len(condition.operations) - 1].operation.operands[0])
    if compared is None or compared.name != "stablehlo.compare":
        return None
    direction = _direction(compared)
    counter, limit_value = compared.operands[0], compared.operands[1]
    position = _position(condition, counter)
    if position is None:
        position, limit_value = _position(condition, limit_value), counter
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if position is None:
        return None
    begin = _number(loop.operands[position], environment)
    limit = _limit(loop, condition, body, limit_value, environment)
    step = _step(body, position, environment)
    if begin is None or limit is None or not step:
        return None
    return _count(begin, limit, step, direction)


def _count(begin: int, limit: int, step: int, direction: str) -> int | None:
    """How often a counter from `begin` moves by `step` until the comparison fails; None if never,
    or if the comparison is another one."""
    if direction in ("GT", "GE"):
        begin, limit, step = -begin, -limit, -step
        direction = {"GT": "LT", "GE": "LE"}[direction]
    distance = limit - begin + (direction == "LE")
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if direction not in ("LT", "LE"):
        return None
    if distance <= 0:
        return 0
    return -(-distance // step) if step > 0 else None


def _owner(value: Any) -> Any:
    """The operation that makes a value; None for a block's argument."""
    owner = value.owner
    return getattr(owner, "operation", owner) if hasattr(owner, "operands") else None


def _direction(compare: Any) -> str:
    found = re.search(r"\b(EQ|NE|GE|GT|LE|LT)\b", str(compare.attributes["comparison_direction"]))
    return found[1] if found else ""


def _position(block: Any, value: Any) -> int | None:
    return next((i for i, one in enumerate(block.arguments) if one == value), None)


def _number(value: Any, environment: Mapping[Any, Value]) -> int | None:
    """The integer that a value always is."""
    if value in environment:
        producer = environment[value].producer
        if producer is None or producer.name != "constant":
            return None
        splat = producer.attributes.get("splat")
        return splat if isinstance(splat, int) else None
    owner = _owner(value)
    if owner is None or owner.name not in _CONSTANTS:
        return None
    found = _SPLAT.search(str(owner.attributes["value"]))
    return int(found[1]) if found else None


def _limit(
    loop: Any, condition: Any, body: Any, value: Any, environment: Mapping[Any, Value]
) -> int | None:
    position = _position(condition, value)
    if position is None:
        return _number(value, environment)
    # `fori_loop` carries its limit along: the same in every iteration.
    returned = body.operations[len(body.operations) - 1].operation.operands[position]
    same = returned == body.arguments[position]
    return _number(loop.operands[position], environment) if same else None


def _step(body: Any, position: int, environment: Mapping[Any, Value]) -> int | None:
    returned = body.operations[len(body.operations) - 1].operation.operands[position]
    moved = _owner(returned)
    if moved is None or moved.name not in ("stablehlo.add", "stablehlo.subtract"):
        return None
    sign = 1 if moved.name == "stablehlo.add" else -1
    left, right = moved.operands[0], moved.operands[1]
    if left == body.arguments[position]:
        amount = _number(right, environment)
    elif right == body.arguments[position] and sign > 0:
        amount = _number(left, environment)
    else:
        return None
    return None if amount is None else sign * amount
