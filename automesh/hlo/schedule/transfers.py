"""Turns single instructions into operations of a schedule: mostly transfers, and compute."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from automesh.collectives import MEGASCALE
from automesh.hlo.collectives import source_of, spread, transfer_of
from automesh.hlo.kinds import kind_of
from automesh.hlo.nouns import Computation, Groups, Instruction, Module
from automesh.hlo.partitions import Partitions
from automesh.hlo.schedule.core_work import compute_of
from automesh.hlo.schedule.nouns import DeviceTransfer, Done, Medium, Operation, Start
from automesh.hlo.schedule.totals import COPIES
from automesh.hlo.work.fusions import FusedCollective, amounts_to, contents_of
from automesh.hlo.work.memories import Touched, platform_of
from automesh.hlo.work.traffic import traffic_of, traffic_of_fused_collective
from automesh.outcomes import ON_THE_HOST, TO_THE_HOST
from automesh.platforms.platform import PlatformName

# Collectives between TPU slices, which a compiled module holds as sends to the host and back.
#
# The compiler hands the operand of a cross-slice collective to the Megascale runtime on the host
# (`send`) and takes the result from it (`recv`). Frontend attributes describe the original
# collective. This is not documented; the attributes are those that libtpu 0.0.42 writes.

_HANDLER = "xla_megascale_runtime"
# Every combination of some slices and some devices: {1,2}x{0:15}.
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")
# Groups or pairs one by one: {{100000,200000},{100001,200001}}, {{100000->200000}}.
_LIST = re.compile(r"\{([\d,]+|\d+->\d+)\}")
# Slices count from 1; the number of a device is its slice times this, plus its id in the slice.
_SLICE = 100_000


def is_megascale(instruction: Instruction) -> bool:
    """Whether it is a send or a receive, or the end of one, that the Megascale runtime serves."""
    return dict(instruction.frontend).get("_xla_host_transfer_handler_name") == _HANDLER


def transfer_between_slices(
    computation: Computation, send: Instruction, partitions: Partitions, hbm_bytes: int
) -> DeviceTransfer:
    """Describes what one cross-slice collective moves.

    Raises:
      ValueError: it is of an unknown kind, names its devices in an unknown way, or names a device
        outside the mesh.
    """
    attributes = dict(send.frontend)
    kind = MEGASCALE.get(attributes.get("_xla_megascale_transfer_type", ""))
    members = _members(attributes.get("_xla_megascale_target", ""), partitions)
    if kind is None or not members:
        raise ValueError(f"`{send.name}` sends to other slices in a way that is not known here")
    in_pairs = kind.name == "collective-permute"
    held = computation.operands(send)[0].shape.bytes
    moved = DeviceTransfer(
        name=send.name,
        kind=kind.name,
        medium="dcn",
        groups=() if in_pairs else members,
        pairs=tuple((source, target) for source, target in members) if in_pairs else (),
        payload_bytes=held,
        wire_bytes=held,
        hbm_bytes=hbm_bytes,
        op_name=send.op_name,
        source=source_of(send),
    )
    return spread(moved, partitions.axes)


def _members(target: str, partitions: Partitions) -> Groups:
    """Parses groups, or pairs, of elements of the mesh; empty if the text has neither form."""
    if product := _PRODUCT.fullmatch(target):
        slices, devices = map(_numbers, product.groups())
        return tuple(
            tuple(partitions.element(number - 1, device) for number in slices) for device in devices
        )
    return tuple(
        tuple(partitions.element(number // _SLICE - 1, number % _SLICE) for number in listed)
        for listed in (_numbers(text.replace("->", ",")) for text in _LIST.findall(target))
    )


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        found += range(int(first), int(last or first) + 1)
    return found


# Sends and receives by which the devices of one program exchange data.
#
# Between TPU slices they are the remains of a collective, see above; on GPUs a compiler may split a
# collective-permute like this (xla/service/collective_ops_utils.h, kSendRecvSourceTargetPairs).

_PAIRS = "_xla_send_recv_source_target_pairs"
_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


def is_exchange(instruction: Instruction) -> bool:
    """Whether it is a send or a receive, or the end of one, between devices of this program."""
    return is_megascale(instruction) or _PAIRS in dict(instruction.frontend)


def join_pairs(module: Module, lanes: AsyncPairs) -> None:
    """Joins the lanes of the send and the receive of one exchange."""
    for computation in module.computations.values():
        first: dict[str, Instruction] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode in ("send", "recv") and is_exchange(instruction):
                attributes = dict(instruction.frontend)
                name = attributes.get(_RENDEZVOUS) or f"channel {instruction.channel}"
                lanes.join(first.setdefault(name, instruction), instruction)


def transfer_in_pairs(
    computation: Computation, send: Instruction, partitions: Partitions, hbm_bytes: int
) -> DeviceTransfer:
    """Describes what one send from device to device moves.

    Raises:
      ValueError: it names a device outside the mesh.
    """
    listed = _PAIR.findall(dict(send.frontend)[_PAIRS])
    pairs = partitions.pairs(tuple((int(source), int(target)) for source, target in listed))
    held = computation.operands(send)[0].shape.bytes
    moved = DeviceTransfer(
        name=send.name,
        kind="collective-permute",
        medium="fabric",
        pairs=pairs,
        payload_bytes=held,
        wire_bytes=held,
        hbm_bytes=hbm_bytes,
        op_name=send.op_name,
        source=source_of(send),
    )
    return spread(moved, partitions.axes)


# Which starts of transfers an operation waits for, across loops.
#
# A compiler may start a transfer in one trip of a loop and finish it in the next, or start it
# before the loop, or finish it after the loop. The handle is then a member of the loop's state. All
# places that can hold one handle form a lane.

_SAME = frozenset({"bitcast", "copy", "opt-barrier", "async-update"})
_WHOLE = -1
# An instruction's value, or one member of its tuple.
_Place = tuple[int, int]


class AsyncPairs:
    """The lanes of a module, found once by joining places that hold the same handle."""

    def __init__(self, module: Module) -> None:
        self._leaders: dict[_Place, _Place] = {}
        self._names: dict[_Place, str] = {}
        for computation in module.computations.values():
            if not computation.is_fusion:
                for instruction in computation.instructions.values():
                    self._follow(module, computation, instruction)

    def of_start(self, start: Instruction) -> str:
        """Returns the lane of the handle of `start`, named after its first start."""
        return self._names.setdefault(self._leader((start.id, _WHOLE)), start.name)

    def of_done(self, done: Instruction) -> str:
        """Returns the lane that `done` waits for."""
        handle = (done.operands[0], _WHOLE)
        return self._names.setdefault(self._leader(handle), f"into {done.name}")

    def join(self, one: Instruction, other: Instruction) -> None:
        """Puts two handles into one lane."""
        self._join((one.id, _WHOLE), (other.id, _WHOLE))

    def _follow(self, module: Module, computation: Computation, instruction: Instruction) -> None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "get-tuple-element":
            self._join((instruction.id, _WHOLE), (operands[0], instruction.tuple_index))
        elif opcode == "tuple":
            for index, operand in enumerate(operands):
                self._join((instruction.id, index), (operand, _WHOLE))
        elif opcode in _SAME:
            self._join_values(instruction, computation.instructions[operands[0]])
        elif opcode == "while":
            self._join_values(instruction, computation.instructions[operands[0]])
            for callee in module.called(instruction):
                self._join_values(instruction, callee.parameters()[0])
            self._join_values(instruction, module.called(instruction)[0].root_instruction)
        elif opcode == "call":
            callee = module.called(instruction)[0]
            self._join_values(instruction, callee.root_instruction)
            for number, parameter in callee.parameters().items():
                self._join_values(parameter, computation.instructions[operands[number]])

    def _join_values(self, one: Instruction, other: Instruction) -> None:
        self._join((one.id, _WHOLE), (other.id, _WHOLE))
        for index in range(len(one.shape.elements)):
            self._join((one.id, index), (other.id, index))

    def _join(self, one: _Place, other: _Place) -> None:
        self._leaders[self._leader(one)] = self._leader(other)

    def _leader(self, place: _Place) -> _Place:
        path: list[_Place] = []
        while (above := self._leaders.setdefault(place, place)) != place:
            path.append(place)
            place = above
        for passed in path:
            self._leaders[passed] = place
        return place


_HOST_THREAD = "host"  # TPU compilers turn `compute_on("device_host")` into this.
_HOST = frozenset({"send", "recv", "infeed", "outfeed"})
# The opcodes of a computation that only moves data.
_MOVES = frozenset(
    {
        "parameter",
        "constant",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "copy",
        "slice",
        "dynamic-slice",
        "dynamic-update-slice",
        "concatenate",
    }
)


class InstructionReader:
    """Reads the instructions of a module that are not control flow."""

    def __init__(self, module: Module, partitions: Partitions) -> None:
        self.platform: PlatformName = platform_of(module)
        self._partitions = partitions
        self._module = module
        self._lanes = AsyncPairs(module)
        join_pairs(module, self._lanes)
        self._contents = {
            fusion.id: contents_of(module, fusion)
            for computation in module.computations.values()
            if not computation.is_fusion
            for fusion in computation.instructions.values()
            if fusion.opcode == "fusion"
        }
        # libtpu numbers the channels of each kind apart: a gather and a sum may have the same one.
        self._begun = {
            (held.instruction.opcode, held.instruction.channel)
            for contents in self._contents.values()
            if contents.starts
            for held in contents.collectives
        }
        self._seen: set[tuple[int, str, int]] = set()
        self._inlined: set[int] = set()
        self._exchanges: set[str] = set()  # Pairs of sends from device to device.
        self._together: dict[str, int] = {}  # Lane -> collectives that one start begins.

    def operations(
        self, computation: Computation, instruction: Instruction
    ) -> Sequence[Operation] | None:
        """Returns an instruction's operations; None if its computation is to be read instead."""
        opcode = instruction.opcode
        if opcode == "fusion":
            return self._fusion(computation, instruction)
        if opcode in _HOST:
            return self._host(computation, instruction)
        if opcode == "async-start":
            return self._wrapped(instruction)
        if opcode == "copy-start":
            touched = self._touched(computation, instruction)
            return self._started(
                instruction, _copy_transfer(instruction, touched, synchronous=False)
            )
        if opcode.endswith("-done"):
            return self._done(computation, instruction)
        if kind_of(instruction):
            return self._plain(computation, instruction)
        return self._compute(computation, instruction)

    def _plain(self, computation: Computation, instruction: Instruction) -> list[Operation]:
        """Reads a collective, or the start of one, that is an instruction of its own."""
        touched = self._touched(computation, instruction)
        now = not instruction.opcode.endswith("-start") or _is_marked_synchronous(instruction)
        held = FusedCollective(computation, instruction)
        moved = self._collective(held, instruction, touched, synchronous=now)
        moves = self._started(instruction, moved)
        return moves or self._compute(computation, instruction)

    def _fusion(self, computation: Computation, fusion: Instruction) -> list[Operation]:
        """Reads a fusion, which may begin, continue, end or contain a collective, and compute."""
        contents = self._contents[fusion.id]
        operations: list[Operation] = []
        is_whole = False
        for held in contents.collectives:
            channel = held.instruction.channel
            lane = f"channel {channel} of {held.instruction.opcode}"
            if contents.finishes:
                operations.append(Done(name=fusion.name, lane=lane))
            elif contents.starts or not self._is_repeated(computation, held):
                touched = traffic_of_fused_collective(computation, fusion, self.platform)
                moved = self._collective(held, fusion, touched, synchronous=not contents.starts)
                operations += self._started(fusion, moved, lane)
                is_whole = not (contents.starts or contents.matmuls)
        return operations if is_whole else [*operations, *self._compute(computation, fusion)]

    def _is_repeated(self, computation: Computation, held: FusedCollective) -> bool:
        """Whether another fusion begins the collective, or another one of this computation contains
        it.

        An all-reduce-scatter of a TPU is whole in its fusion: two of them are two, although libtpu
        gives both the same channel where one was split in two (0.0.52, embedding tables).
        """
        channel = held.instruction.channel
        kind = held.instruction.opcode
        place = (computation.id, kind, channel)
        is_known = (kind, channel) in self._begun or (
            place in self._seen and amounts_to(held) != "reduce-scatter"
        )
        if channel == 0 or not is_known:
            self._seen.add(place)
            return False
        return True

    def _host(self, computation: Computation, instruction: Instruction) -> list[Operation]:
        """Reads sends and receives; those between devices of the program are collectives."""
        if is_exchange(instruction):
            if instruction.opcode == "recv":
                return []
            touched = self._touched(computation, instruction)
            between = transfer_between_slices if is_megascale(instruction) else transfer_in_pairs
            moved = between(computation, instruction, self._partitions, hbm_bytes=touched.main)
            self._exchanges.add(self._lanes.of_start(instruction))
            return self._started(instruction, moved)
        payload = sum(operand.shape.bytes for operand in computation.operands(instruction))
        payload = payload or instruction.shape.bytes
        moved = DeviceTransfer(
            name=instruction.name,
            kind="send",
            medium="host",
            payload_bytes=payload,
            wire_bytes=payload,
            hbm_bytes=payload,
            synchronous=instruction.opcode in ("infeed", "outfeed"),
            uncounted=f"{instruction.opcode} {TO_THE_HOST}",
            op_name=instruction.op_name,
            source=source_of(instruction),
        )
        return self._started(instruction, moved)

    def _wrapped(self, start: Instruction) -> list[Operation] | None:
        """Reads a start that wraps a computation: a collective, a copy, or anything else."""
        callee = self._module.called(start)[0]
        if start.thread == _HOST_THREAD:
            return self._started(start, _host_work(start, callee))
        if collectives := list(self._wrapped_collectives(callee)):
            return self._grouped_collectives(start, collectives)
        if self._only_moves(callee):
            touched = _sum(
                self._touched(callee, instruction) for instruction in callee.instructions.values()
            )
            return self._started(start, _copy_transfer(start, touched, synchronous=False))
        self._inlined.add(start.id)
        return None

    def _grouped_collectives(
        self, start: Instruction, collectives: Sequence[FusedCollective]
    ) -> list[Operation]:
        """Finds the collectives of a wrapped computation: usually one, on GPUs also a group."""
        operations: list[Operation] = []
        now = _is_marked_synchronous(start)
        for held in collectives:
            touched = self._touched(held.computation, held.instruction)
            by = start if len(collectives) == 1 else held.instruction
            moved = self._collective(held, by, touched, synchronous=now)
            operations += self._started(start, moved)
        begun = sum(isinstance(operation, Start) for operation in operations)
        self._together[self._lanes.of_start(start)] = begun
        return operations

    def _wrapped_collectives(self, computation: Computation) -> Iterator[FusedCollective]:
        """Finds collectives of a wrapped computation; that of a SparseCore is one call deeper."""
        for instruction in computation.instructions.values():
            if kind_of(instruction):
                yield FusedCollective(computation, instruction)
            elif instruction.opcode == "call":
                yield from self._wrapped_collectives(self._module.called(instruction)[0])

    def _touched(self, computation: Computation, instruction: Instruction) -> Touched:
        return traffic_of(self._module, computation, instruction, self.platform)

    def _only_moves(self, computation: Computation) -> bool:
        return all(
            self._only_moves(self._module.called(instruction)[0])
            if instruction.opcode == "fusion"
            else instruction.opcode in _MOVES
            for instruction in computation.instructions.values()
        )

    def _collective(
        self, held: FusedCollective, by: Instruction, touched: Touched, *, synchronous: bool
    ) -> DeviceTransfer:
        return transfer_of(
            self._module,
            held.computation,
            held.instruction,
            self._partitions,
            platform=self.platform,
            by=by,
            kind=amounts_to(held) if by.opcode == "fusion" else "",
            hbm_bytes=touched.main,
            synchronous=synchronous,
        )

    def _started(self, by: Instruction, moved: DeviceTransfer, lane: str = "") -> list[Operation]:
        if moved.group_size == 1 and moved.kind not in COPIES:  # Nothing leaves the device.
            return []
        start = Start(transfer=moved, lane=lane or self._lanes.of_start(by))
        return [start, Done(name=by.name, lane=start.lane)] if moved.synchronous else [start]

    def _done(self, computation: Computation, done: Instruction) -> list[Operation]:
        (begun, *_) = computation.operands(done)
        if _is_marked_synchronous(begun) or begun.id in self._inlined:
            return []
        lane = self._lanes.of_done(done)
        if done.opcode == "send-done" and lane in self._exchanges:
            return []  # The program waits for the receive.
        ends: list[Operation] = [Done(name=done.name, lane=lane)]
        for number in range(1, self._together.get(lane, 1)):
            ends.append(Done(name=f"{done.name} ({number + 1})", lane=lane))
        return ends

    def _compute(self, computation: Computation, instruction: Instruction) -> list[Operation]:
        touched = self._touched(computation, instruction)
        operations: list[Operation] = []
        if touched.host:
            operations += self._started(
                instruction, _copy_transfer(instruction, touched, synchronous=True)
            )
            touched = Touched(main=0, chip=touched.chip)
        contents = self._contents.get(instruction.id)
        one = compute_of(computation, instruction, touched, contents)
        return operations if one is None else [*operations, one]


def _is_marked_synchronous(start: Instruction) -> bool:
    """Whether a GPU compiler has marked a start as having nothing to overlap with."""
    config = start.config.get("collective_backend_config") or {}
    return bool(config.get("is_sync"))


def _copy_transfer(by: Instruction, touched: Touched, *, synchronous: bool) -> DeviceTransfer:
    """Makes a copy between memories, of half the bytes that it reads and writes."""
    medium: Medium = "host" if touched.host else "memory"
    size = touched.host or (touched.main + touched.chip) // 2
    return DeviceTransfer(
        name=by.name,
        kind="copy",
        medium=medium,
        payload_bytes=size,
        wire_bytes=size,
        hbm_bytes=touched.main,
        synchronous=synchronous,
        op_name=by.op_name,
        source=source_of(by),
    )


def _host_work(start: Instruction, work: Computation) -> DeviceTransfer:
    """Makes work of the host's processors: only its operands and results have a price."""
    taken = sum(parameter.shape.bytes for parameter in work.parameters().values())
    size = taken + work.root_instruction.shape.bytes
    return DeviceTransfer(
        name=start.name,
        kind="copy",
        medium="host",
        payload_bytes=size,
        wire_bytes=size,
        hbm_bytes=size,
        uncounted=f"{ON_THE_HOST}, but for what it takes and returns",
        op_name=start.op_name,
        source=source_of(start),
    )


def _sum(touches: Iterable[Touched]) -> Touched:
    every = list(touches)
    return Touched(
        main=sum(one.main for one in every),
        chip=sum(one.chip for one in every),
        host=sum(one.host for one in every),
    )
