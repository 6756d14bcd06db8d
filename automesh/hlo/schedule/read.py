"""Reads a compiled module as the schedule of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from automesh.hlo.collectives import source_of
from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.partitions import Partitions
from automesh.hlo.schedule.nouns import Block, Branch, Loop, Operation, Schedule
from automesh.hlo.schedule.totals import costliest, tally_of
from automesh.hlo.schedule.transfers import InstructionReader
from automesh.hlo.trace import Place, element, origin

# How often the body of a while loop runs.

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


def read_schedule(
    module: Module, axes: Sequence[tuple[str, int]], dcn: Sequence[int] = ()
) -> Schedule:
    """Reads what one device does in one step, in order.

    Asynchronous collectives become a `Start` and a `Done`, whatever a compiler makes of them: pairs
    of instructions, TPU fusions that begin, carry on and end one, rings of permutes, sends to other
    slices by way of the host. So do copies between memories.

    Args:
      module: as one device runs it.
      axes: names and sizes of the mesh's axes, in order: device i of the program is element i of
        the flat mesh.
      dcn: of each axis, how many granules it spans; needed where TPU slices work together.

    Raises:
      ValueError: a collective names a device that is outside the mesh, or the module is for one of
        several slices and `dcn` does not say how the mesh lies on them.
    """
    partitions = Partitions(module, tuple(axes), dcn)
    reader = _Reader(module, InstructionReader(module, partitions))
    body = reader.block(module.entry_computation)
    return Schedule(
        platform=reader.instructions.platform,
        axes=tuple(axes),
        body=body,
        is_ordered=module.entry_computation.is_scheduled,
        uncounted=tally_of(body).remarks(),
    )


class _Reader:
    """One run of `read_schedule`: every computation is read once."""

    def __init__(self, module: Module, instructions: InstructionReader) -> None:
        self.instructions = instructions
        self._module = module
        self._blocks: dict[int, Block] = {}

    def block(self, computation: Computation) -> Block:
        """The operations of one execution of `computation`."""
        if computation.id not in self._blocks:
            operations: list[Operation] = []
            for instruction in computation.instructions.values():
                operations += self._operations(computation, instruction)
            self._blocks[computation.id] = Block(operations=tuple(operations))
        return self._blocks[computation.id]

    def _operations(
        self, computation: Computation, instruction: Instruction
    ) -> Sequence[Operation]:
        opcode = instruction.opcode
        if opcode == "while":
            return self._loop(computation, instruction)
        if opcode == "conditional":
            return [self._branch(instruction)]
        if opcode == "call":
            return self._called(instruction)
        moves = self.instructions.operations(computation, instruction)
        # Work on another thread of the device: it stands where it starts, and nothing waits.
        return self._called(instruction) if moves is None else moves

    def _called(self, instruction: Instruction) -> Sequence[Operation]:
        return self.block(self._module.called(instruction)[0]).operations

    def _loop(self, computation: Computation, loop: Instruction) -> list[Operation]:
        body, condition = map(self.block, self._module.called(loop))
        known = trip_count(self._module, computation, loop)
        remark = ""
        if known.trips is None:
            remark = f"loop {_label(loop)} of unknown length counted once"
        elif known.source == "assumed":
            remark = f"loop {_label(loop)} taken to run {known.trips} times from 0 in steps of 1"
        return [
            Loop(
                name=loop.name,
                trips=1 if known.trips is None else known.trips,
                body=Block(operations=condition.operations + body.operations),
                uncounted=remark,
                op_name=loop.op_name,
                source=source_of(loop),
            ),
            *condition.operations,
        ]

    def _branch(self, conditional: Instruction) -> Branch:
        branch = Branch(
            name=conditional.name,
            blocks=tuple(map(self.block, self._module.called(conditional))),
            op_name=conditional.op_name,
            source=source_of(conditional),
        )
        most = costliest(branch)
        others = map(tally_of, branch.blocks)
        if all(other.work() == most.work() for other in others):
            return branch
        remark = f"conditional {_label(conditional)} counted as its costliest branch"
        return replace(branch, uncounted=remark)


def _label(instruction: Instruction) -> str:
    place = source_of(instruction)
    return f"`{instruction.name}` ({place})" if place else f"`{instruction.name}`"
