"""Replays a scheduled program on hardware: how long a step takes, and what it waits for (no jax).

The model has these simplifications: all devices do the same at the same time, so that one is
played; collectives neither slow down the cores nor load the device's memory; a branch is its
costliest block.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from automesh.collectives import is_kind, kind_named, priced_as
from automesh.cost.replay.engine import Played, play
from automesh.cost.replay.program import (
    LATENCY,
    MEMORY_CAUSE,
    TICKS_PER_S,
    Await,
    CoreWork,
    Depart,
    Flight,
    Repeat,
    Step,
    Use,
    ticks,
)
from automesh.cost.replay.timeline import Timeline
from automesh.hardware.calibration.engines import engines_of
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.chips import Chip
from automesh.hardware.fabric.fabric import Fabric, Route
from automesh.hardware.fabric.links import DCN, HOST, LinkMap, LinkUse, Pairs
from automesh.hardware.fabric.placement import Placement
from automesh.hardware.model import HardwareModel
from automesh.hlo.schedule.nouns import (
    Branch,
    Compute,
    DeviceTransfer,
    Done,
    ScheduledBlock,
    ScheduledLoop,
    ScheduledMatmul,
    ScheduledProgram,
    Start,
    executed,
)
from automesh.hlo.schedule.totals import tally_of
from automesh.mesh.axes import MeshAxis, format_mesh
from automesh.outcomes import Causes, ReplayOutcome, largest_first

# The price of one instruction on the cores.

# The compiler has tuned its tiles if half of a program's multiply-adds are in operations with at
# most this many times the least possible cycles. libtpu 0.0.42.1: an 8192 cube takes 1.14 times as
# many at default effort and 9.4 at low effort; steps of transformers 1.0 to 1.2.
_TUNED = 2.0
# Lower limit of the same ratio for a single operation: rounding is no reason to distrust the
# compiler.
_SLACK = 0.99
# A TPU's core has a unit for single numbers (loop counters, offsets): its compiler states no cycles
# for them, and they start no kernel. Two operands and a result of eight bytes each, and some more.
_SCALAR_BYTES = 64


class InstructionPrices:
    """Prices the instructions of one program.

    Attributes:
      trust: whether the compiler's cycles for matrix products are used; None if it states none.
    """

    def __init__(self, schedule: ScheduledProgram, chip: Chip, speeds: Speeds) -> None:
        engines = engines_of(chip)
        self._speeds = speeds
        self._flops_per_cycle = engines.flops_per_cycle
        self._clock_hz = engines.clock_hz(chip)
        self._onchip_bytes_per_s = engines.onchip * speeds.memory_bytes_per_s
        self._matmul_s: dict[ScheduledMatmul, float] = {}
        self.trust = self._trusts(schedule)

    def work(self, one: Compute) -> CoreWork:
        """Prices one instruction.

        Cores compute while memory is read and written: the longer of both counts. A matrix product
        takes the cycles that the compiler states, if they are trusted, else `Speeds.matmul_s`.
        Anything else takes the time of its memory traffic and the start of a kernel, or the
        compiler's cycles if they are fewer.
        """
        memory = one.hbm_bytes / self._speeds.memory_bytes_per_s
        onchip = one.onchip_bytes / self._onchip_bytes_per_s
        overhead = self._speeds.kernel_overhead_s
        stated = one.cycles / self._clock_hz if self._clock_hz else 0.0
        if not one.flops:
            return self._streaming(one, memory, onchip, stated)
        if self.trust and one.kind == "matrix" and self._excess(one) >= _SLACK:
            computing, overhead = stated, 0.0
        else:
            computing = self._multiplying_s(one)
        computing = max(computing, onchip)
        cause = "compute" if computing >= memory else MEMORY_CAUSE
        return _made(one, cause, max(computing, memory), memory, overhead, computing + memory)

    def _streaming(self, one: Compute, memory: float, onchip: float, stated: float) -> CoreWork:
        spent, overhead = max(memory, onchip), self._speeds.kernel_overhead_s
        size = one.hbm_bytes + one.onchip_bytes
        if self._clock_hz and not stated and size <= _SCALAR_BYTES:
            overhead = 0.0
        elif stated and stated < spent + overhead:
            # Compilers state too many cycles for memory traffic; if they state fewer, the
            # instruction is tiny.
            spent, overhead = stated, 0.0
        return _made(one, MEMORY_CAUSE, spent, min(memory, spent), overhead, spent)

    def _excess(self, one: Compute) -> float:
        """Returns stated cycles divided by the least possible ones; 0 if none are stated."""
        return one.cycles * self._flops_per_cycle / one.flops

    def _trusts(self, schedule: ScheduledProgram) -> bool | None:
        found = sorted(
            (self._excess(one), times * one.flops)
            for one, times in executed(schedule.body)
            if isinstance(one, Compute) and one.kind == "matrix" and one.flops
            if self._excess(one)
        )
        left = sum(flops for _, flops in found) / 2
        for excess, flops in found:
            left -= flops
            if left <= 0:
                return _SLACK <= excess <= _TUNED
        return None

    def _multiplying_s(self, one: Compute) -> float:
        if not one.matmuls:
            # A kernel states operations but no shape: a cube is assumed.
            side = max(round((one.flops / 2) ** (1 / 3)), 1)
            cube = ScheduledMatmul(dtype=one.dtype or "bf16", batch=1, m=side, n=side, k=side)
            return self._product_s(cube) * one.flops / (2 * side**3)
        return sum(self._product_s(product) for product in one.matmuls)

    def _product_s(self, product: ScheduledMatmul) -> float:
        if product not in self._matmul_s:
            sizes = (product.batch, product.m, product.n, product.k)
            found = self._speeds.matmul_s(product.dtype, *(np.array([float(n)]) for n in sizes))
            self._matmul_s[product] = float(found[0])
        return self._matmul_s[product]


def _made(
    one: Compute, cause: str, spent: float, memory: float, overhead: float, serial: float
) -> CoreWork:
    causes = ((cause, ticks(spent)), (LATENCY, ticks(overhead)))
    return CoreWork(
        name=one.name,
        causes=tuple(pair for pair in causes if pair[1]),
        memory=ticks(memory),
        serial=ticks(serial) + ticks(overhead),
        flops=one.flops,
        source=one.source,
    )


# The price of transfers, and their wires.

Seconds = tuple[float, float, float]


class Flights:
    """Prices transfers, each pattern and size once.

    Args:
      axes: of the mesh, in order.
      patterns: of messages between pairs that are traced link by link, see `LinkMap`.
    """

    def __init__(
        self,
        axes: Sequence[MeshAxis],
        hardware: HardwareModel,
        patterns: Sequence[Pairs] = (),
    ) -> None:
        self._sizes = {axis.name: axis.size for axis in axes}
        self._fabric = fabric = hardware.fabric
        self._speeds = hardware.speeds
        self._host_bytes_per_s = engines_of(fabric.chip).host_bytes_per_s
        self._links = LinkMap(Placement(axes, fabric, hardware.layouts), hardware.layouts, patterns)
        self._known: dict[tuple[object, ...], tuple[Seconds, Seconds, LinkUse]] = {}

    def flight(self, one: DeviceTransfer) -> Flight:
        """Returns the flight of one transfer."""
        if one.medium == "memory":
            # Read and written: twice the copied bytes, unless one side is on the chip.
            moved = one.hbm_bytes or one.payload_bytes
            spent = ticks(moved / self._speeds.memory_bytes_per_s)
            return Flight(name=one.name, memory=spent, source=one.source)
        if one.medium == "host":
            return self._to_host(one)
        return self._to_others(one)

    def _to_host(self, one: DeviceTransfer) -> Flight:
        spent = ticks(one.payload_bytes / self._host_bytes_per_s)
        latency = ticks(self._speeds.kernel_overhead_s)
        return Flight(
            name=one.name,
            latency=latency,
            uses=(Use(resource=HOST, ticks=spent, cause=HOST),),
            alone=((HOST, spent + latency),),
            source=one.source,
        )

    def _to_others(self, one: DeviceTransfer) -> Flight:
        (latency, ici, dcn), apart, wires = self._priced(one)
        names = "+".join(one.axes) or "other groups"
        inside, between = f"ici {names}", f"dcn {names}"
        uses: list[Use] = []
        if apart[2]:
            # Messages to other granules are sent at the same time as those inside.
            uses.append(Use(resource=DCN, ticks=ticks(apart[2]), cause=between))
        if dcn:
            uses.append(
                Use(
                    resource=DCN,
                    ticks=ticks(dcn),
                    cause=between,
                    tail=ticks(ici),
                    tail_cause=inside,
                )
            )
        for wire, share in wires.shares:
            uses.append(self._inner_use(wire, ici * share, dcn, (inside, between)))
        return Flight(
            name=one.name,
            latency=ticks(max(latency, apart[0])),
            uses=tuple(use for use in uses if use.ticks or use.tail),
            alone=_alone(uses, ticks(max(latency, apart[0])), inside, between),
            source=one.source,
        )

    def _inner_use(self, wire: str, ici: float, dcn: float, causes: tuple[str, str]) -> Use:
        inside, between = causes
        if dcn and self._fabric.kind != "torus":
            # One ring runs through all granules: its links inside are busy as long as it runs.
            return Use(resource=wire, ticks=ticks(ici) + ticks(dcn), cause=between)
        return Use(
            resource=wire, ticks=ticks(ici), cause=inside, tail=ticks(dcn), tail_cause=between
        )

    def _priced(self, one: DeviceTransfer) -> tuple[Seconds, Seconds, LinkUse]:
        """Returns seconds of latency, inside, and between granules; of `apart` the same; wires."""
        kind = priced_as(one.kind) if is_kind(one.kind) else one.kind
        key = (kind, one.medium, one.axes, one.groups, one.pairs, one.payload_bytes, one.group_size)
        if key not in self._known:
            wires = self._wires(one, kind)
            main = self._seconds(kind, one.payload_bytes, wires.route)
            further = wires.further_hops * self._fabric.chip.link_latency_s
            apart = (0.0, 0.0, 0.0)
            if wires.apart is not None:
                apart = self._seconds(kind, one.payload_bytes, wires.apart)
            self._known[key] = ((main[0] + further, *main[1:]), apart, wires)
        return self._known[key]

    def _wires(self, one: DeviceTransfer, kind: str) -> LinkUse:
        if one.pairs or (kind == "collective-permute" and not one.groups):
            return self._links.of_pairs(one.pairs)
        spreads = kind_named(kind).sends == "exchange"
        whole = math.prod(self._sizes[name] for name in one.axes)
        if one.axes and whole == one.group_size:
            return self._links.of_axes(one.axes, spreads=spreads)
        groups = one.groups or (tuple(range(math.prod(self._sizes.values()))),)
        return self._links.of_groups(groups, spreads=spreads)

    def _seconds(self, kind: str, payload_bytes: int, route: Route) -> Seconds:
        found = self._speeds.collective_s(kind, np.array([float(payload_bytes)]), route)
        return float(found.latency_s[0]), float(found.ici_s[0]), float(found.dcn_s[0])


def _alone(
    uses: Sequence[Use], latency: int, inside: str, between: str
) -> tuple[tuple[str, int], ...]:
    """Splits a flight's own time inside and between granules; latency is in the larger part."""
    longest = max(uses, key=lambda use: use.ticks + use.tail, default=None)
    if longest is None:
        return ((inside, latency),) if latency else ()
    parts = {inside: 0, between: 0}
    parts[longest.cause] += longest.ticks
    if longest.tail:
        parts[longest.tail_cause] += longest.tail
    parts[max(parts, key=lambda name: parts[name])] += latency
    return tuple((name, spent) for name, spent in parts.items() if spent)


# A limit, since every pattern may double the strands of a direction.
_TOLD_APART = 6


def replay(
    schedule: ScheduledProgram,
    *,
    axes: Sequence[MeshAxis],
    hardware: HardwareModel,
) -> tuple[ReplayOutcome, Timeline]:
    """Plays one step of a scheduled program.

    Args:
      axes: of the plan, in the order of the mesh.
      hardware: with the layout of the plan's ICI shape at least.

    Raises:
      AutomeshError: the layouts say nothing about the shape.
      ValueError: the program was read for another mesh.
    """
    if tuple((axis.name, axis.size) for axis in axes) != schedule.axes:
        read = ", ".join(f"{name}:{size}" for name, size in schedule.axes)
        raise ValueError(f"the program was read for the mesh {read}, not {format_mesh(axes)}")
    kernels = InstructionPrices(schedule, hardware.fabric.chip, hardware.speeds)
    flights = Flights(axes, hardware, _patterns(schedule))
    played = play(_program(schedule.body, kernels, flights))
    uncounted = list(schedule.uncounted)
    if not schedule.is_ordered:
        uncounted.append("no schedule: operations stand in an order in which they can run")
    if kernels.trust is False:
        uncounted.append(
            "the compiler's cycles are far from the operations of its matrix products: "
            "priced by their sizes"
        )
    return _replayed(played, hardware.fabric, tuple(uncounted)), played.timeline


def _patterns(schedule: ScheduledProgram) -> list[Pairs]:
    """Selects the patterns of messages between pairs that move most bytes."""
    moved: Counter[Pairs] = Counter()
    for one, times in executed(schedule.body):
        if isinstance(one, Start) and one.transfer.pairs:
            moved[one.transfer.pairs] += times * one.transfer.payload_bytes
    return [pairs for pairs, _ in moved.most_common(_TOLD_APART)]


def _program(
    block: ScheduledBlock, kernels: InstructionPrices, flights: Flights
) -> tuple[Step, ...]:
    steps: list[Step] = []
    for operation in block.operations:
        match operation:
            case Compute():
                steps.append(kernels.work(operation))
            case Start():
                steps.append(Depart(flight=flights.flight(operation.transfer), lane=operation.lane))
            case Done():
                steps.append(Await(lane=operation.lane))
            case ScheduledLoop():
                body = _program(operation.body, kernels, flights)
                steps.append(
                    Repeat(
                        name=operation.name,
                        trips=operation.trips,
                        body=body,
                        source=operation.source,
                    )
                )
            case Branch():
                steps += _program(_costliest(operation), kernels, flights)
    return tuple(steps)


def _costliest(branch: Branch) -> ScheduledBlock:
    """Returns the block that `automesh.hlo.count` chooses: with most FLOPs, then bytes.

    Not the slowest one: then a faster wire could make a step slower, because another block would be
    played.
    """
    return max(branch.blocks, key=lambda block: tally_of(block).rank())


def _replayed(played: Played, fabric: Fabric, uncounted: tuple[str, ...]) -> ReplayOutcome:
    step_s = played.step / TICKS_PER_S
    possible = fabric.chip.flops_per_s * step_s
    return ReplayOutcome(
        step_s=step_s,
        bracket_s=(
            max(played.busy.values(), default=0) / TICKS_PER_S,
            max(played.serial, played.step) / TICKS_PER_S,
        ),
        causes=_seconds(played.causes),
        communication_s=_seconds(played.alone),
        busy_s=_seconds(played.busy),
        mfu=played.flops / possible if possible else 0.0,
        uncounted=uncounted,
    )


def _seconds(amounts: dict[str, int]) -> Causes:
    return largest_first((name, amount / TICKS_PER_S) for name, amount in amounts.items())
