"""A scheduled program as the operations of one device, in order: what a replay plays.

A device runs a `ScheduledBlock` from its first operation to its last. `Compute` uses the cores;
`Start` hands a `DeviceTransfer` to wires or to a copy engine and takes no time itself; `Done` waits
for it; `ScheduledLoop` and `Branch` contain further blocks. This module knows no hardware: it has
sizes, bytes, and which devices exchange them, but no seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from automesh.hlo.nouns import Groups
from automesh.hlo.spans import Axes
from automesh.platforms.platform import PlatformName

# `fabric`: from device to device, over whatever connects the devices of a group: links inside a
# granule, on GPUs and CPUs also the network between granules. `dcn`: from granule to granule
# through the hosts, stated by the program itself (TPU slices). `host`: between a device and its
# host's memory. `memory`: between two memories of one device, by a copy engine.
Medium = Literal["fabric", "dcn", "host", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledMatmul:
    """One matrix product of a device's local sizes, as `Speeds.matmul_s` prices it.

    A convolution is described as the product with the same work: `m` output positions of all
    images, `n` output features, `k` input features times the elements of the window that meet a
    real one.

    Attributes:
      dtype: element type of the operands in XLA's words (bf16, f32, f8e4m3fn); of two, the wider.
    """

    dtype: str
    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """The work of the cores in one instruction, for instance in a whole fusion.

    Attributes:
      name: of the HLO instruction, unique in the program.
      kind: `matrix` if it multiplies matrices, `kernel` for a custom call that the compiler cannot
        see into, else `memory`: bound by what it reads and writes.
      opcode: in XLA's words; for a custom call its target.
      matmuls: what it multiplies; empty for `memory`; for a `kernel` the product that it repeats,
        if its program was counted.
      flops: of `matmuls`, exactly (two per multiply-add that meets no padding); for a `kernel`
        those that its author states, without a shape, or that were counted in its program.
      dtype: element type that `flops` are done in; empty if there are none.
      hbm_bytes: read from and written to the device's main memory.
      onchip_bytes: read from and written to memory on the chip that the program addresses (VMEM of
        a TPU); 0 elsewhere.
      cycles: core clock cycles by the compiler's own estimate; 0 if it states none. TPU compilers
        state them: trustworthy for `matrix` at default effort, too many for `memory`.
      uncounted: in words, why flops or bytes may be missing; empty if none are.
      op_name: what the user's program called it; empty if unknown.
      source: `step.py:123`, empty if unknown.
    """

    name: str
    kind: Literal["matrix", "memory", "kernel"]
    opcode: str
    matmuls: tuple[ScheduledMatmul, ...] = ()
    flops: int = 0
    dtype: str = ""
    hbm_bytes: int = 0
    onchip_bytes: int = 0
    cycles: int = 0
    uncounted: str = ""
    op_name: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTransfer:
    """One movement of data that runs asynchronously to the cores.

    Attributes:
      name: of the HLO instruction that starts it, unique in the program.
      kind: as in `outcomes.Collective`, or `copy`, or `send` (to the host or to another program).
      medium: what carries it.
      axes: mesh axes that the groups or pairs span, in the order of the mesh; empty for copies, and
        if the groups fit no axes.
      groups: all groups, never empty for a collective but a collective-permute: logical partition
        ids, which are indices into `mesh.devices.flat`. Over `dcn` the members are the devices that
        exchange with each other, as a rule one of each granule.
      pairs: (source, target) of a collective-permute, in the same ids.
      group_size: devices of the largest group, ring or chain; 1 for copies.
      payload_bytes: the full (gathered or unreduced) array of one group; for a collective-permute
        and a copy what one device sends. As in `outcomes.Collective` for one execution.
      wire_bytes: that one device sends, by the ring algorithm.
      hbm_bytes: what the transfer reads from and writes to the device's main memory.
      synchronous: the program waits at once: its `Done` directly follows its `Start`.
      uncounted: in words, why bytes may be wrong; empty if they are not.
      op_name: what the user's program called it; empty if unknown.
      source: `step.py:123`, empty if unknown.
    """

    name: str
    kind: str
    medium: Medium
    axes: tuple[str, ...] = ()
    groups: Groups = ()
    pairs: tuple[tuple[int, int], ...] = ()
    group_size: int = 1
    payload_bytes: int
    wire_bytes: int
    hbm_bytes: int = 0
    synchronous: bool = False
    uncounted: str = ""
    op_name: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Begins a transfer and appends it to a lane.

    Attributes:
      lane: which queue it joins. A transfer may be started in one trip of a loop and finished in
        the next, or before a loop and in it, or in it and after it: all of these share a lane.
    """

    transfer: DeviceTransfer
    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Waits for the oldest transfer of a lane and removes it; does nothing on an empty lane.

    Attributes:
      name: of the HLO instruction, unique in the program.
    """

    name: str
    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledLoop:
    """Runs a block again and again.

    Attributes:
      trips: how often; 1 if the program does not say.
      body: one trip, the test of the condition first. (The last test, which fails, follows the loop
        in the block that holds it.)
      uncounted: in words, what is assumed about `trips`; empty if nothing is.
    """

    name: str
    trips: int
    body: ScheduledBlock
    uncounted: str = ""
    op_name: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Runs one of several blocks; which one depends on the data.

    Attributes:
      uncounted: in words, if it matters which; empty if all do the same work.
    """

    name: str
    blocks: tuple[ScheduledBlock, ...]
    uncounted: str = ""
    op_name: str = ""
    source: str = ""


Operation = Compute | Start | Done | ScheduledLoop | Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBlock:
    """Operations in the order in which a device issues them; calls are written out."""

    operations: tuple[Operation, ...]


def executed(block: ScheduledBlock, times: int = 1) -> Iterator[tuple[Operation, int]]:
    """Yields all operations, in loops and in all branches too, and how often each is run.

    Args:
      times: how often the block itself is run.
    """
    for operation in block.operations:
        yield operation, times
        if isinstance(operation, ScheduledLoop):
            yield from executed(operation.body, times * operation.trips)
        elif isinstance(operation, Branch):
            for inner in operation.blocks:
                yield from executed(inner, times)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledProgram:
    """A scheduled program.

    Attributes:
      platform: whose compiler wrote it.
      axes: names and sizes of the mesh's axes, in order: device i of the program is element i of
        the flat mesh.
      body: the whole step.
      is_ordered: False if the compiler left no schedule: the operations are then in a possible
        order.
      uncounted: what has no size, in words, as in `outcomes.Counts`: all remarks of the operations
        that run, with their number.
    """

    platform: PlatformName
    axes: Axes
    body: ScheduledBlock
    is_ordered: bool = True
    uncounted: tuple[str, ...] = ()
