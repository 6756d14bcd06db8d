"""A scheduled program as the operations of one device, in order: what a replay plays.

A device runs a `Block` from its first operation to its last. `Compute` takes the cores; `Start`
hands a `Transfer` to wires or to a copy engine and takes no time of its own; `Done` waits for it;
`Loop` and `Branch` hold further blocks. No hardware is known here: sizes, bytes and who talks to
whom, but no seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from automesh.hlo.nouns import Groups
from automesh.hlo.spans import Axes
from automesh.platforms.platform import PlatformName

# `fabric`: from device to device, over whatever joins the devices of a group: links inside a
# granule, on GPUs and CPUs the network between granules as well. `dcn`: from granule to granule,
# by way of the hosts, as the program says itself (TPU slices). `host`: between a device and its
# host's memory. `memory`: between two memories of one device, by a copy engine.
Medium = Literal["fabric", "dcn", "host", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """One matrix product of a device's local sizes, as `Speeds.matmul_s` prices it.

    A convolution stands as the product of the same work: `m` output positions of all images, `n`
    output features, `k` input features times the elements of the window that meet a real one.

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
    """What the cores do in one instruction, a whole fusion for instance.

    Attributes:
      name: of the HLO instruction, unique in the program.
      kind: `matrix` if it multiplies matrices, `kernel` for a custom call whose inside the compiler
        does not see, else `memory`: bounded by what it reads and writes.
      opcode: in XLA's words; for a custom call its target.
      matmuls: what it multiplies; empty for `memory`; of a `kernel` the product that it repeats,
        where its program was counted.
      flops: of `matmuls`, exactly (two per multiply-add that meets no padding); of a `kernel` those
        that its author states, which have no shape, or that were counted in its program.
      dtype: element type that `flops` are done in; empty if there are none.
      hbm_bytes: read from and written to the device's main memory.
      onchip_bytes: read from and written to memory on the chip that the program addresses (VMEM of
        a TPU); 0 elsewhere.
      cycles: core clock cycles by the compiler's own estimate; 0 if it states none. TPU compilers
        do: trustworthy for `matrix` at default effort, too many for `memory`.
      uncounted: in words, why flops or bytes may be missing; empty if nothing is.
      op_name: what the user's program called it; empty if unknown.
      source: `step.py:123`, empty if unknown.
    """

    name: str
    kind: Literal["matrix", "memory", "kernel"]
    opcode: str
    matmuls: tuple[Matmul, ...] = ()
    flops: int = 0
    dtype: str = ""
    hbm_bytes: int = 0
    onchip_bytes: int = 0
    cycles: int = 0
    uncounted: str = ""
    op_name: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One movement of data beside the cores.

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
      synchronous: the program waits on the spot: its `Done` follows its `Start` directly.
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
    """Begins a transfer and enters it into a lane.

    Attributes:
      lane: which queue it joins. A transfer may be started in one trip of a loop and finished in
        the next, or before a loop and in it, or in it and after it: all of these share a lane.
    """

    transfer: Transfer
    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """Waits for the oldest transfer of a lane and takes it out; does nothing on an empty lane.

    Attributes:
      name: of the HLO instruction, unique in the program.
    """

    name: str
    lane: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Runs a block again and again.

    Attributes:
      trips: how often; 1 if the program does not say.
      body: one trip, the test of the condition first. (The last test, which fails, follows the loop
        in the block that holds it.)
      uncounted: in words, what is taken for granted about `trips`; empty if nothing is.
    """

    name: str
    trips: int
    body: Block
    uncounted: str = ""
    op_name: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Runs one of several blocks: which one, only the data know.

    Attributes:
      uncounted: in words, if it matters which; empty if all do the same work.
    """

    name: str
    blocks: tuple[Block, ...]
    uncounted: str = ""
    op_name: str = ""
    source: str = ""


Operation = Compute | Start | Done | Loop | Branch


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Operations in the order in which a device issues them; calls are written out."""

    operations: tuple[Operation, ...]


def executed(block: Block, times: int = 1) -> Iterator[tuple[Operation, int]]:
    """All operations of a block, those of loops and of all branches too, and how often each is run.

    Args:
      times: how often the block itself is.
    """
    for operation in block.operations:
        yield operation, times
        if isinstance(operation, Loop):
            yield from executed(operation.body, times * operation.trips)
        elif isinstance(operation, Branch):
            for inner in operation.blocks:
                yield from executed(inner, times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A scheduled program.

    Attributes:
      platform: whose compiler wrote it.
      axes: names and sizes of the mesh's axes, in order: device i of the program is element i of
        the flat mesh.
      body: the whole step.
      is_ordered: False if the compiler left no schedule: the operations stand in an order in which
        they can run.
      uncounted: what has no size, in words, as in `outcomes.Counts`: all remarks of the operations
        that run, with how often.
    """

    platform: PlatformName
    axes: Axes
    body: Block
    is_ordered: bool = True
    uncounted: tuple[str, ...] = ()
