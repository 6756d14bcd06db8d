"""Sums over a schedule: what one device does in one step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from automesh.hlo.schedule.nouns import (
    Branch,
    Compute,
    DeviceTransfer,
    Done,
    Operation,
    ScheduledBlock,
    ScheduledLoop,
)

CollectiveKey = tuple[str, tuple[str, ...], int]
# Kinds of transfers that are no collectives.
COPIES = ("copy", "send")


@dataclass(slots=True)
class CollectiveTotal:
    """Executions of collectives of one kind over one set of axes, and their bytes."""

    count: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0


@dataclass(slots=True)
class Tally:
    """Running sums; `collectives` by kind, axes and size of the group."""

    flops: int = 0
    hbm_bytes: int = 0
    collectives: dict[CollectiveKey, CollectiveTotal] = field(default_factory=dict)
    uncounted: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally, times: int) -> None:
        """Adds what happens `times` times."""
        self.flops += other.flops * times
        self.hbm_bytes += other.hbm_bytes * times
        for key, moved in other.collectives.items():
            if times:
                mine = self.collectives.setdefault(key, CollectiveTotal())
                mine.count += moved.count * times
                mine.payload_bytes += moved.payload_bytes * times
                mine.wire_bytes += moved.wire_bytes * times
        for text, occurrences in other.uncounted.items():
            self.uncounted[text] += occurrences * times

    def remarks(self) -> tuple[str, ...]:
        """Lists what could not be counted, with the number of times, sorted."""
        return tuple(
            f"{text} ({times} times)" if times > 1 else text
            for text, times in sorted(self.uncounted.items())
            if times
        )

    def work(self) -> tuple[int, int, dict[CollectiveKey, CollectiveTotal]]:
        """Returns the work without its remarks."""
        return self.flops, self.hbm_bytes, self.collectives

    def rank(self) -> tuple[int, int]:
        """Returns a sort key that finds the costliest of several branches."""
        return self.flops, self.hbm_bytes


def tally_of(block: ScheduledBlock) -> Tally:
    """Sums a block, with loops multiplied, and the costliest block of each branch."""
    tally = Tally()
    for operation in block.operations:
        _add(tally, operation)
    return tally


def _add(tally: Tally, operation: Operation) -> None:
    if isinstance(operation, Done):
        return
    if isinstance(operation, Compute):
        tally.flops += operation.flops
        tally.hbm_bytes += operation.hbm_bytes
        remark = operation.uncounted
    elif isinstance(operation, ScheduledLoop):
        tally.add(tally_of(operation.body), operation.trips)
        remark = operation.uncounted
    elif isinstance(operation, Branch):
        tally.add(costliest(operation), 1)
        remark = operation.uncounted
    else:
        transfer = operation.transfer
        tally.hbm_bytes += transfer.hbm_bytes
        remark = transfer.uncounted
        _add_transfer(tally, transfer)
    if remark:
        tally.uncounted[remark] += 1


def _add_transfer(tally: Tally, transfer: DeviceTransfer) -> None:
    if transfer.kind in COPIES or transfer.group_size == 1:
        return
    key = (transfer.kind, transfer.axes, transfer.group_size)
    moved = tally.collectives.setdefault(key, CollectiveTotal())
    moved.count += 1
    moved.payload_bytes += transfer.payload_bytes
    moved.wire_bytes += transfer.wire_bytes


def costliest(branch: Branch) -> Tally:
    """Returns the sums of a branch's costliest block: most FLOPs, then most bytes."""
    return max(map(tally_of, branch.blocks), key=Tally.rank)
