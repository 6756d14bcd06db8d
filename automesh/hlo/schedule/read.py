"""Reads a compiled module as the schedule of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from automesh.hlo.collectives import source_of
from automesh.hlo.linear import Linear, executions
from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.partitions import Partitions
from automesh.hlo.schedule.nouns import (
    Branch,
    Operation,
    ScheduledBlock,
    ScheduledLoop,
    ScheduledProgram,
)
from automesh.hlo.schedule.totals import costliest, tally_of
from automesh.hlo.schedule.transfers import InstructionReader
from automesh.hlo.trace import CalledInstruction, element, origin
from automesh.outcomes import UNKNOWN_LENGTH

# How often the body of a while loop runs.

_DEEPEST = 64  # Instructions between a bound and what it is computed from.


@dataclass(frozen=True, slots=True, kw_only=True)
class TripCount:
    """The number of trips of a loop, and the source of that number.

    Attributes:
      trips: None if unknown.
      source: `stated` by the compiler; `derived` from the loop's start, step and limit; `assumed`:
        the limit is constant, and start 0 and step 1 are assumed; `unknown`.
    """

    trips: int | None
    source: Literal["stated", "derived", "assumed", "unknown"]


UNKNOWN = TripCount(trips=None, source="unknown")


def trip_count(module: Module, computation: Computation, loop: Instruction) -> TripCount:
    """Counts the trips of `loop`, a `while` in `computation`, each time it is reached.

    CPU and GPU compilers state the number if they know it. Otherwise it is derived from the
    condition: start and limit may depend on data, as long as their difference does not.
    """
    stated = loop.config.get("known_trip_count", {}).get("n")
    if stated is not None:
        return TripCount(trips=int(stated), source="stated")
    condition = module.computations[loop.called[1]]
    test = origin(
        module, CalledInstruction(computation=condition, instruction=condition.root_instruction)
    )
    if test.instruction.opcode != "compare":
        return UNKNOWN
    left, right = (_form(module, operand, _DEEPEST) for operand in test.operands())
    distance, direction = left.plus(right, -1), test.instruction.direction
    begin, step, is_known = _at_start(module, computation, loop, distance)
    if is_known:
        trips, source = executions(begin, step, direction), "derived"
    elif abs(step) == 1:
        trips, source = executions(begin, step, direction), "assumed"
    else:
        return UNKNOWN
    return UNKNOWN if trips is None else TripCount(trips=trips, source=source)


def _at_start(
    module: Module, computation: Computation, loop: Instruction, distance: Linear
) -> tuple[int, int, bool]:
    """Returns the distance when a loop begins, and what one execution adds to it.

    Returns:
      distance, step, whether both are known. If they are not, but the distance depends on one
      member of the state alone, that is assumed to begin at 0 with step 1; otherwise the step is 0.
    """
    begin, step, is_known = distance, 0, True
    members = [value for value in distance.factors if isinstance(value, _Member)]
    for member in members:
        factor = distance.factors[member]
        begin = begin.plus(Linear.of(member), -factor)
        start = _start(module, computation, loop, member.index)
        moved = _increment(module, loop, member.index)
        if _is_unchanged(module, loop, member.index):
            moved = 0
        if start is None or moved is None:
            is_known = False
            continue
        begin, step = begin.plus(start, factor), step + factor * moved
    if is_known and begin.number is not None:
        return begin.number, step, True
    if len(members) == 1 and set(distance.factors) == {members[0]}:
        return distance.constant, distance.factors[members[0]], False
    return 0, 0, False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """A member of the state of a loop, in its body or its condition."""

    index: int


def _form(module: Module, place: CalledInstruction, depth: int) -> Linear:
    """Expresses a whole number at a place as a linear sum of unknown values."""
    place = origin(module, place)
    instruction = place.instruction
    member = _state_index(place)
    if member is not None:
        return Linear.of(_Member(index=member))
    number = _integer(place)
    if number is not None:
        return Linear(constant=number)
    # A computation that is called from two places has different values in each call.
    itself = Linear.of((place.computation.id, instruction.id, place.arguments))
    is_whole = instruction.shape.element_type[0] in "su"
    if depth <= 0 or not is_whole or instruction.shape.dims:
        return itself
    if instruction.opcode == "get-tuple-element":
        return _loop_result_form(module, place, itself, depth)
    if instruction.opcode not in ("add", "subtract", "negate", "convert", "multiply"):
        return itself
    operands = [_form(module, operand, depth - 1) for operand in place.operands()]
    match instruction.opcode:
        case "add" | "subtract":
            return operands[0].plus(operands[1], 1 if instruction.opcode == "add" else -1)
        case "negate":
            return operands[0].times(-1)
        case "multiply":
            for one, other in (operands, operands[::-1]):
                if one.number is not None:
                    return other.times(one.number)
            return itself
        case _:
            before = place.operand(0).instruction.shape.element_type
            return operands[0] if before[0] in "su" else itself


def _loop_result_form(
    module: Module, place: CalledInstruction, itself: Linear, depth: int
) -> Linear:
    """Expresses a member of a loop's result: its first value, if no execution changes it."""
    loop, index = origin(module, place.operand(0)), place.instruction.tuple_index
    if loop.instruction.opcode != "while" or not _is_unchanged(module, loop.instruction, index):
        return itself
    before = element(module, loop.operand(0), index)
    return itself if before is None else _form(module, before, depth - 1)


def _start(
    module: Module, computation: Computation, loop: Instruction, index: int
) -> Linear | None:
    state = CalledInstruction(computation=computation, instruction=loop).operand(0)
    first = element(module, state, index)
    return None if first is None else _form(module, first, _DEEPEST)


def _increment(module: Module, loop: Instruction, index: int) -> int | None:
    """Returns what one execution adds to a member of a loop's state; None if unknown."""
    after = _after(module, loop, index)
    if after is None:
        return None
    return _form(module, after, _DEEPEST).plus(Linear.of(_Member(index=index)), -1).number


def _is_unchanged(module: Module, loop: Instruction, index: int) -> bool:
    after = _after(module, loop, index)
    return after is not None and _state_index(after) == index


def _after(module: Module, loop: Instruction, index: int) -> CalledInstruction | None:
    body = module.computations[loop.called[0]]
    return element(
        module, CalledInstruction(computation=body, instruction=body.root_instruction), index
    )


def _state_index(place: CalledInstruction) -> int | None:
    """Returns which member of the loop's state a place in its body or condition is."""
    if place.instruction.opcode != "get-tuple-element":
        return None
    source = place.operand(0)
    is_state = source.instruction.opcode == "parameter" and source.arguments is None
    return place.instruction.tuple_index if is_state else None


def _integer(place: CalledInstruction) -> int | None:
    value = place.instruction.literal
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_schedule(
    module: Module, axes: Sequence[tuple[str, int]], dcn: Sequence[int] = ()
) -> ScheduledProgram:
    """Reads what one device does in one step, in order.

    Asynchronous collectives become a `Start` and a `Done`, in all forms that compilers use: pairs
    of instructions, TPU fusions that begin, continue and end one, rings of permutes, sends to other
    slices through the host. So do copies between memories.

    Args:
      module: as one device runs it.
      axes: names and sizes of the mesh's axes, in order: device i of the program is element i of
        the flat mesh.
      dcn: number of granules that each axis spans; needed if the program spans several TPU slices.

    Raises:
      ValueError: a collective names a device outside the mesh, or the module is for one of several
        slices and `dcn` does not say how the mesh is spread over them.
    """
    partitions = Partitions(module, tuple(axes), dcn)
    reader = _ScheduleReader(module, InstructionReader(module, partitions))
    body = reader.block(module.entry_computation)
    return ScheduledProgram(
        platform=reader.instructions.platform,
        axes=tuple(axes),
        body=body,
        is_ordered=module.entry_computation.is_scheduled,
        uncounted=tally_of(body).remarks(),
    )


class _ScheduleReader:
    """One run of `read_schedule`: every computation is read once."""

    def __init__(self, module: Module, instructions: InstructionReader) -> None:
        self.instructions = instructions
        self._module = module
        self._blocks: dict[int, ScheduledBlock] = {}

    def block(self, computation: Computation) -> ScheduledBlock:
        """Returns the operations of one execution of `computation`."""
        if computation.id not in self._blocks:
            operations: list[Operation] = []
            for instruction in computation.instructions.values():
                operations += self._operations(computation, instruction)
            self._blocks[computation.id] = ScheduledBlock(operations=tuple(operations))
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
        # Work on another thread of the device is placed where it starts, and nothing waits for it.
        return self._called(instruction) if moves is None else moves

    def _called(self, instruction: Instruction) -> Sequence[Operation]:
        return self.block(self._module.called(instruction)[0]).operations

    def _loop(self, computation: Computation, loop: Instruction) -> list[Operation]:
        body, condition = map(self.block, self._module.called(loop))
        known = trip_count(self._module, computation, loop)
        remark = ""
        if known.trips is None:
            remark = f"loop {_label(loop)} {UNKNOWN_LENGTH} counted once"
        elif known.source == "assumed":
            remark = f"loop {_label(loop)} taken to run {known.trips} times from 0 in steps of 1"
        return [
            ScheduledLoop(
                name=loop.name,
                trips=1 if known.trips is None else known.trips,
                body=ScheduledBlock(operations=condition.operations + body.operations),
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
