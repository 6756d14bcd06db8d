"""Counts a loop's trips, if the distance between its counter and limit is known (jax).

Bounds may depend on data: only their difference has to be a number, and what an iteration adds to
it. Both are followed through additions, conversions, loops that carry a value along unchanged, and
calls. Where they depend on the place of the device, the longest loop counts.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from automesh.hlo.linear import Linear, executions
from automesh.ir.graph import Value
from automesh.ir.op_kinds import VIEWS
from automesh.sharding.mlir.places import NoNumber, devices_of, on_each_device

_SPLAT = re.compile(r"dense<(-?\d+)>")
_TYPE = re.compile(r"(?:tensor<)?(?:[su]?i)(\d+)>?$")
_CONSTANTS = frozenset(("constant",))
# Their results are equal to their operands, one by one.
_SAME = VIEWS | {"reshard", "propagation_barrier", "sharding_constraint", "data_flow_edge"}
# The same operands give the same result.
_PURE = frozenset(
    (
        "abs", "and", "ceil", "clamp", "compare", "convert", "divide", "floor", "maximum",
        "minimum", "multiply", "negate", "not", "or", "power", "remainder", "select", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "slice", "xor",
    )
)  # fmt: skip
_DEEPEST = 64  # Operations between a bound and what it is computed from.


@dataclass(frozen=True, slots=True, kw_only=True)
class Trips:
    """The number of executions of a loop's body.

    Attributes:
      count: the number; None if it is unknown.
      differs: whether devices at other places run it less often.
    """

    count: int | None
    differs: bool = False


def trips(loop: Any, environment: Mapping[Any, Value]) -> Trips:
    """Counts the executions of the body of a `stablehlo.while`.

    Args:
      loop: the operation; its condition compares two whole numbers.
      environment: graph values of the surrounding block's MLIR values.
    """
    condition, body = (region.blocks[0] for region in loop.regions)
    compared = _owner(condition.operations[len(condition.operations) - 1].operation.operands[0])
    if compared is None or compared.name != "stablehlo.compare":
        return Trips(count=None)
    forms = _Forms(environment)
    left, right = (forms.of(value) for value in compared.operands)
    distance = left.plus(right, -1)
    begin, step = distance, 0
    for number, argument in enumerate(condition.arguments):
        factor = distance.factors.get(argument, 0)
        if not factor:
            continue
        moved = _moved(forms, body, number)
        if moved is None:
            return Trips(count=None)
        step += factor * moved
        begin = begin.plus(Linear.of(argument), -factor)
        begin = begin.plus(forms.of(loop.operands[number]), factor)
    start, direction = begin.number, _direction(compared)
    if start is None:
        return _on_the_slowest_device(loop, compared, step, direction)
    return Trips(count=executions(start, step, direction))


def _on_the_slowest_device(loop: Any, compared: Any, step: int, direction: str) -> Trips:
    """Counts the executions on the device with the most of them, for which the others wait, where
    the bounds depend on the place of the device."""
    devices = devices_of(loop)
    left, right = (on_each_device(loop, value, devices) for value in compared.operands)
    counts: set[int] = set()
    try:
        for one, other in zip(left, right, strict=True):
            count = executions(one - other, step, direction)
            if count is None:
                return Trips(count=None)
            counts.add(count)
    except NoNumber:  # They depend on data.
        return Trips(count=None)
    return Trips(count=max(counts), differs=len(counts) > 1)


def _moved(forms: _Forms, body: Any, number: int) -> int | None:
    """Returns what one execution of a loop's body adds to a value that the loop carries."""
    returned = body.operations[len(body.operations) - 1].operation.operands[number]
    return forms.of(returned).plus(Linear.of(body.arguments[number]), -1).number


class _Forms:
    """Values as linear sums of unknown ones; each is computed once."""

    def __init__(self, environment: Mapping[Any, Value]) -> None:
        self._environment = environment
        self._known: dict[Any, Linear] = {}

    def of(self, value: Any, depth: int = _DEEPEST) -> Linear:
        """Returns the sum of an MLIR value."""
        if value not in self._known:
            self._known[value] = self._form(value, depth)
        return self._known[value]

    def _form(self, value: Any, depth: int) -> Linear:
        owner = _owner(value)
        if depth <= 0:
            return Linear.of(value)
        if owner is None:
            return self._of_argument(value, depth)
        name = str(owner.name).partition(".")[2]
        operands = list(owner.operands)
        if name in _CONSTANTS:
            found = _SPLAT.search(str(owner.attributes["value"]))
            return Linear(constant=int(found[1])) if found else Linear.of(value)
        if name == "get_dimension_size":
            return Linear(constant=_size(owner))
        if name in _SAME and len(operands) == len(owner.results):
            return self.of(operands[_place(owner.results, value)], depth - 1)
        if name == "while":
            return self._behind_loop(owner, value, depth)
        if name == "convert" and not all(_is_whole(one.type) for one in (value, operands[0])):
            return Linear.of(value)
        return _combined(
            name,
            [self.of(one, depth - 1) for one in operands] if _is_scalar(value.type) else [],
            lambda: self._key(owner, name, operands, value, depth),
        )

    def _key(self, owner: Any, name: str, operands: list[Any], value: Any, depth: int) -> Hashable:
        """Returns a key that equal values share, as the partitioner makes copies of scalars."""
        if name not in _PURE or len(owner.results) != 1 or not _is_scalar(value.type):
            return value
        # Names in newer versions of jaxlib, pairs of a name and an attribute in older ones.
        names = (getattr(one, "name", one) for one in owner.attributes)
        stated = tuple(
            (one, str(owner.attributes[one])) for one in names if not one.startswith("sdy.")
        )
        return (name, stated, tuple(_frozen(self.of(one, depth - 1)) for one in operands))

    def _of_argument(self, value: Any, depth: int) -> Linear:
        block = value.owner
        parent = getattr(block, "owner", None)
        around = getattr(parent, "operation", parent)
        if around is not None and around.name == "stablehlo.while":
            number = _place(block.arguments, value)
            if _is_unchanged(around, number):
                return self.of(around.operands[number], depth - 1)
        is_manual = getattr(around, "name", "") == "sdy.manual_computation"
        if is_manual and _is_scalar(value.type):  # Not split.
            outside: Any = around
            return self.of(outside.operands[_place(block.arguments, value)], depth - 1)
        if value in self._environment:
            return _form_in_graph(self._environment[value], depth)
        return Linear.of(value)

    def _behind_loop(self, loop: Any, value: Any, depth: int) -> Linear:
        number = _place(loop.results, value)
        if _is_unchanged(loop, number):
            return self.of(loop.operands[number], depth - 1)
        return Linear.of(value)


def _size(owner: Any) -> int:
    """Returns the result of `get_dimension_size`, as all shapes are known."""
    dimension = int(str(owner.attributes["dimension"]).partition(" ")[0])
    return int(str(owner.operands[0].type).removeprefix("tensor<").split("x")[dimension])


def _form_in_graph(value: Value, depth: int) -> Linear:
    """Returns the sum of an inlined function's argument, which its caller passes."""
    producer = value.producer
    if producer is None or depth <= 0:
        return Linear.of(value)
    operands = producer.operands
    if producer.name == "constant":
        splat = producer.attributes.get("splat")
        return Linear(constant=splat) if isinstance(splat, int) else Linear.of(value)
    if producer.name in _SAME and len(operands) == len(producer.results):
        return _form_in_graph(operands[producer.results.index(value)], depth - 1)
    if producer.name == "convert" and not all("i" in one.dtype for one in (value, operands[0])):
        return Linear.of(value)
    found = [_form_in_graph(one, depth - 1) for one in operands] if not value.shape else []
    return _combined(producer.name, found, lambda: value)


def _combined(name: str, operands: list[Linear], key: Any) -> Linear:
    """Returns the sum of the result of an operation on whole numbers.

    Args:
      key: returns the unknown for the result if it is no sum of the operands.
    """
    if name == "convert" and len(operands) == 1:
        return operands[0]
    if name == "negate" and len(operands) == 1:
        return operands[0].times(-1)
    if name in ("add", "subtract") and len(operands) == 2:
        return operands[0].plus(operands[1], 1 if name == "add" else -1)
    if name == "multiply" and len(operands) == 2:
        for one, other in (operands, operands[::-1]):
            if one.number is not None:
                return other.times(one.number)
    return Linear.of(key())


def _frozen(form: Linear) -> Hashable:
    return (form.constant, frozenset(form.factors.items()))


def _is_unchanged(loop: Any, number: int) -> bool:
    """Whether a loop returns a carried value unchanged."""
    body = loop.regions[1].blocks[0]
    returned = body.operations[len(body.operations) - 1].operation.operands[number]
    return bool(returned == body.arguments[number])


def _owner(value: Any) -> Any:
    """Returns the operation that makes a value; None for a block's argument."""
    owner = value.owner
    return getattr(owner, "operation", owner) if hasattr(owner, "operands") else None


def _direction(compare: Any) -> str:
    found = re.search(r"\b(EQ|NE|GE|GT|LE|LT)\b", str(compare.attributes["comparison_direction"]))
    return found[1] if found else ""


def _place(values: Iterable[Any], value: Any) -> int:
    return next(number for number, one in enumerate(values) if one == value)


def _is_whole(kind: Any) -> bool:
    return _TYPE.search(str(kind)) is not None


def _is_scalar(kind: Any) -> bool:
    return "x" not in str(kind)
