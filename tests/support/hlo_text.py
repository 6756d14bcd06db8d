"""Small modules in XLA's text form, for tests of what compilers write."""

from __future__ import annotations

from automesh.hlo import Module, read_module
from automesh.hlo.schedule.nouns import (
    Compute,
    Done,
    Operation,
    ScheduledBlock,
    ScheduledLoop,
    ScheduledProgram,
    Start,
)
from automesh.hlo.schedule.read import read_schedule
from tests.support.hlo_oracle import from_text

ADD = "add {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}"

EIGHT = (("dp", 2), ("tp", 4))
WHOLE = 64 * 4
GPU = 'backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":SYNC}}'


def module(entry: str, *computations: str, devices: int = 1) -> Module:
    head = f"HloModule m, is_scheduled=true, num_partitions={devices}"
    return read_module(from_text("\n".join([head, *computations, f"ENTRY e {{\n{entry}\n}}"])))


def schedule(
    entry: str, *computations: str, axes: tuple[tuple[str, int], ...] = (("dp", 1),)
) -> ScheduledProgram:
    devices = 1
    for _, size in axes:
        devices *= size
    return read_schedule(module(entry, *computations, devices=devices), axes)


def flattened(block: ScheduledBlock) -> list[Operation]:
    """All operations, loops written out."""
    found: list[Operation] = []
    for one in block.operations:
        if isinstance(one, ScheduledLoop):
            for _ in range(one.trips):
                found += flattened(one.body)
        else:
            found.append(one)
    return found


def spelled(block: ScheduledBlock) -> list[str]:
    """Operations in short: `start all-gather lane`, `done lane`, `matrix`."""
    said: list[str] = []
    for one in flattened(block):
        if isinstance(one, Start):
            said.append(f"start {one.transfer.kind} {one.lane}")
        elif isinstance(one, Done):
            said.append(f"done {one.lane}")
        elif isinstance(one, Compute):
            said.append(f"{one.kind} {one.name}")
    return said
