"""Counts what one device does in one step of a compiled program."""

from __future__ import annotations

from collections.abc import Sequence

from automesh.hlo.nouns import Module
from automesh.hlo.schedule.nouns import ScheduledProgram
from automesh.hlo.schedule.read import read_schedule
from automesh.hlo.schedule.totals import tally_of
from automesh.outcomes import Collective, Counts


def count(module: Module, axes: Sequence[tuple[str, int]], dcn: Sequence[int] = ()) -> Counts:
    """Counts FLOPs, memory traffic and collectives, with loops multiplied by their trips.

    For a conditional, the costliest branch counts. FLOPs are those of matrix multiplications and
    convolutions, and those that the author of a kernel states.

    Args:
      module: as one device runs it.
      axes: names and sizes of the mesh's axes, in order: device i of the program is element i of
        the flat mesh.
      dcn: number of granules that each axis spans; needed if the program spans several TPU slices.

    Raises:
      ValueError: as `read_schedule`.
    """
    return count_schedule(read_schedule(module, axes, dcn))


def count_schedule(schedule: ScheduledProgram) -> Counts:
    """Counts what a schedule does, as `count` does for its module."""
    tally = tally_of(schedule.body)
    order = {name: position for position, (name, _) in enumerate(schedule.axes)}
    collectives = [
        Collective(
            kind=kind,
            axes=spanned,
            group_size=size,
            count=moved.count,
            payload_bytes=moved.payload_bytes,
            wire_bytes=moved.wire_bytes,
        )
        for (kind, spanned, size), moved in tally.collectives.items()
    ]
    return Counts(
        flops=tally.flops,
        hbm_bytes=tally.hbm_bytes,
        collectives=tuple(
            sorted(collectives, key=lambda c: (c.kind, [order[a] for a in c.axes], c.group_size))
        ),
        uncounted=schedule.uncounted,
    )
