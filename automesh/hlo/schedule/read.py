"""Reads a compiled module as the schedule of one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from automesh.hlo.collectives import source_of
from automesh.hlo.nouns import Computation, Instruction, Module
from automesh.hlo.partitions import Partitions
from automesh.hlo.schedule.nouns import Block, Branch, Loop, Operation, Schedule
from automesh.hlo.schedule.totals import costliest, tally_of
from automesh.hlo.schedule.transfers import InstructionReader
from automesh.hlo.schedule.trip_counts import trip_count


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
                is_known=known.trips is not None,
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
        if all(one.work() == most.work() for one in others):
            return branch
        remark = f"conditional {_label(conditional)} counted as its costliest branch"
        return replace(branch, uncounted=remark)


def _label(instruction: Instruction) -> str:
    place = source_of(instruction)
    return f"`{instruction.name}` ({place})" if place else f"`{instruction.name}`"
