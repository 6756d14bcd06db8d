"""How often the body of a while loop runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.trace import Place, element, origin

_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TripCount:
    """How often a loop runs, and how that is known.

    Attributes:
      trips: None if unknown.
      source: `stated` by the compiler; `derived` from the loop's start, step and limit; `assumed`:
        the limit is constant, start 0 and step 1 are taken for granted; `unknown`.
    """

    trips: int | None
    source: Literal["stated", "derived", "assumed", "unknown"]


@dataclass(frozen=True, slots=True)
class _Limit:
    """The loop goes on while state member `index` is in `direction` to `value`."""

    index: int
    direction: str
    value: int


UNKNOWN = TripCount(trips=None, source="unknown")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> TripCount:
    """Says how often the body of `loop`, a `while` in `computation`, runs when it is reached.

    CPU and GPU compilers state it; for TPU modules it is derived from the condition.
    """
    stated = loop.config.get("known_trip_count", {}).get("n")
    if stated is not None:
        return TripCount(trips=int(stated), source="stated")
    limit = _limit(module, computation, loop)
    if limit is None:
        return UNKNOWN
    start = _start(module, computation, loop, limit.index)
    step = _step(module, loop, limit.index)
    if start is None or step is None:
        trips, source = _trips(limit, 0, 1), "assumed"
    else:
        trips, source = _trips(limit, start, step), "derived"
    return UNKNOWN if trips is None else TripCount(trips=trips, source=source)


def _limit(module: Module, computation: Computation, loop: Instruction) -> _Limit | None:
    condition = module.computations[loop.called[1]]
    test = origin(module, Place(computation=condition, instruction=condition.root_instruction))
    if test.instruction.opcode != "compare":
        return None
    left, right = (origin(module, operand) for operand in test.operands())
    direction = test.instruction.direction
    if _state_index(left) is None:
        left, right, direction = right, left, _MIRRORED[direction]
    index = _state_index(left)
    value = _integer(right)
    other = _state_index(right)
    if value is None and other is not None and _unchanged(module, loop, other):
        value = _start(module, computation, loop, other)
    return None if index is None or value is None else _Limit(index, direction, value)


def _start(module: Module, computation: Computation, loop: Instruction, index: int) -> int | None:
    state = Place(computation=computation, instruction=loop).operand(0)
    first = element(module, state, index)
    return None if first is None else _integer(first)


def _step(module: Module, loop: Instruction, index: int) -> int | None:
    after = _after(module, loop, index)
    if after is None or after.instruction.opcode not in ("add", "subtract"):
        return None
    left, right = (origin(module, operand) for operand in after.operands())
    if _state_index(left) != index and after.instruction.opcode == "add":
        left, right = right, left
    if _state_index(left) != index:
        return None
    step = _integer(right)
    return -step if step is not None and after.instruction.opcode == "subtract" else step


def _unchanged(module: Module, loop: Instruction, index: int) -> bool:
    after = _after(module, loop, index)
    return after is not None and _state_index(after) == index


def _after(module: Module, loop: Instruction, index: int) -> Place | None:
    body = module.computations[loop.called[0]]
    return element(module, Place(computation=body, instruction=body.root_instruction), index)


def _state_index(place: Place) -> int | None:
    """Which member of the loop's state a place in its body or condition is."""
    if place.instruction.opcode != "get-tuple-element":
        return None
    source = place.operand(0)
    is_state = source.instruction.opcode == "parameter" and source.arguments is None
    return place.instruction.tuple_index if is_state else None


def _integer(place: Place) -> int | None:
    value = place.instruction.literal
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _trips(limit: _Limit, start: int, step: int) -> int | None:
    if step == 0:
        return None
    if limit.direction == "NE":
        trips, rest = divmod(limit.value - start, step)
        return trips if rest == 0 and trips >= 0 else None
    if limit.direction in ("LT", "LE") and step > 0:
        distance = limit.value - start + (limit.direction == "LE")
    elif limit.direction in ("GT", "GE") and step < 0:
        distance, step = start - limit.value + (limit.direction == "GE"), -step
    else:
        return None
    return max(0, -(-distance // step))
