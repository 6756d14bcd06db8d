"""A schedule for a part of the mesh, in the whole mesh's numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from automesh.hlo.schedule.nouns import Block, Branch, Loop, Operation, Schedule, Start, Transfer
from automesh.hlo.spans import Axes


def renumbered(schedule: Schedule, axes: Axes, numbers: Sequence[int]) -> Schedule:
    """The same schedule as one of devices of a larger mesh.

    Args:
      axes: names and sizes of the whole mesh's axes.
      numbers: in the whole mesh, of each device of the program, in its order.
    """
    body = schedule.body
    if any(number != place for place, number in enumerate(numbers)):
        body = _block(body, numbers)
    return replace(schedule, axes=axes, body=body)


def _block(block: Block, numbers: Sequence[int]) -> Block:
    return Block(operations=tuple(_operation(operation, numbers) for operation in block.operations))


def _operation(one: Operation, numbers: Sequence[int]) -> Operation:
    if isinstance(one, Start):
        return replace(one, transfer=_transfer(one.transfer, numbers))
    if isinstance(one, Loop):
        return replace(one, body=_block(one.body, numbers))
    if isinstance(one, Branch):
        return replace(one, blocks=tuple(_block(block, numbers) for block in one.blocks))
    return one


def _transfer(moved: Transfer, numbers: Sequence[int]) -> Transfer:
    return replace(
        moved,
        groups=tuple(tuple(numbers[member] for member in group) for group in moved.groups),
        pairs=tuple((numbers[source], numbers[target]) for source, target in moved.pairs),
    )
