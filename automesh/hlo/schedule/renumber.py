"""Renumbers the devices of a schedule for a part of the mesh to those of the whole mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from automesh.hlo.schedule.nouns import (
    Branch,
    DeviceTransfer,
    Operation,
    ScheduledBlock,
    ScheduledLoop,
    ScheduledProgram,
    Start,
)
from automesh.hlo.spans import Axes


def renumbered(schedule: ScheduledProgram, axes: Axes, numbers: Sequence[int]) -> ScheduledProgram:
    """Returns the same schedule with the device numbers of a larger mesh.

    Args:
      axes: names and sizes of the whole mesh's axes.
      numbers: in the whole mesh, of each device of the program, in its order.
    """
    body = schedule.body
    if any(number != place for place, number in enumerate(numbers)):
        body = _block(body, numbers)
    return replace(schedule, axes=axes, body=body)


def _block(block: ScheduledBlock, numbers: Sequence[int]) -> ScheduledBlock:
    return ScheduledBlock(
        operations=tuple(_operation(operation, numbers) for operation in block.operations)
    )


def _operation(one: Operation, numbers: Sequence[int]) -> Operation:
    if isinstance(one, Start):
        return replace(one, transfer=_transfer(one.transfer, numbers))
    if isinstance(one, ScheduledLoop):
        return replace(one, body=_block(one.body, numbers))
    if isinstance(one, Branch):
        return replace(one, blocks=tuple(_block(block, numbers) for block in one.blocks))
    return one


def _transfer(moved: DeviceTransfer, numbers: Sequence[int]) -> DeviceTransfer:
    return replace(
        moved,
        groups=tuple(tuple(numbers[member] for member in group) for group in moved.groups),
        pairs=tuple((numbers[source], numbers[target]) for source, target in moved.pairs),
    )
