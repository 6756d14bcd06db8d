"""Splits the price of a step on one mesh: the cost of every collective and kernel (no jax).

Pricing sums pieces for thousands of meshes; this module keeps the pieces of one mesh separate.
Every time here is that of the piece alone, as if nothing ran at the same time; `Estimated` has the
times with overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from automesh.collectives import kind_named
from automesh.cost import collective_demand, kernels
from automesh.cost.collective_demand import Collectives
from automesh.cost.collective_prices import PlanRoutes, pieces_of_groups
from automesh.cost.formulas import Formulas, with_copies
from automesh.cost.kernels import DistinctKernels, HostLink, KernelPieces
from automesh.cost.route_table import RoutesOf, RouteTable
from automesh.cost.terms import (
    Finding,
    Footprint,
    Kernel,
    Matmul,
    Monomial,
    Terms,
    Uncounted,
    flops,
    value_of,
)
from automesh.cost.windowed import for_windows
from automesh.hardware.calibration.speeds import Speeds
from automesh.mesh.plan_arrays import Batch, Sizes
from automesh.units import format_seconds

# Sizes of a multiplication that uses any known device fully; smaller ones are compared with it.
_LARGE = 8192.0
AXIS_OVER_DCN = "axis-over-dcn"
_LEAST_OVER_DCN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Equal collectives of one source line on one mesh; seconds are of all executions of a step.

    Attributes:
      region: where it runs: `step`, or the loop around it.
      in_loop: True if `region` is a loop.
      count: executions per step.
      payload_bytes: of one execution: the full array of one group, see `CollectiveTerm`.
      group_size: devices of one group.
      latency_s, ici_s, dcn_s: by cause.
      exposed: part of the executions that no compute can hide.
      granules: granules that its groups span; more than 1 means that it crosses DCN.
      is_ring: True if it is the ring of a windowed multiplication instead of a collective.
    """

    kind: str
    axes: tuple[str, ...]
    source: str
    operand: str
    region: str
    in_loop: bool
    count: float
    payload_bytes: float
    group_size: int
    latency_s: float
    ici_s: float
    dcn_s: float
    exposed: float
    granules: int
    is_ring: bool = False

    @property
    def device_bytes(self) -> float:
        """Returns the bytes of one execution on one device: what it holds before or after it,
        whichever is more. For an all-to-all that is its part of the full array."""
        is_part = kind_named(self.kind).sends == "exchange"
        return self.payload_bytes / self.group_size if is_part else self.payload_bytes

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes that one device sends in one execution; see `CollectiveKind`."""
        return kind_named(self.kind).wire_bytes(round(self.payload_bytes), self.group_size)

    @property
    def seconds(self) -> float:
        return self.latency_s + self.ici_s + self.dcn_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSum:
    """One kernel on one mesh; seconds are of all executions of a step.

    Attributes:
      count: executions per step.
      bytes: read and written in device memory per execution, without data that stays on the chip.
      flops: of the multiplications of one execution.
      matmul_s: the multiplications at the speed that their sizes allow.
      ideal_s: the multiplications at the speed of large ones.
      memory_s: the bytes at the speed of device memory, including those that a windowed
        multiplication reads again while it multiplies.
      ring_s: the accumulator traffic of a windowed multiplication, at the speed of device memory.
      overhead_s: of starting it.
      matmul: local `(batch, m, n, k)` of its largest multiplication; zeros if it has none.
      cut_axes: mesh axes that make the smallest of m, n, k smaller.
      repeated_axes: axes larger than 1 along which all devices do the same multiplications.
      repeats: product of the sizes of `repeated_axes`.
      reread_s: the part of `memory_s` in which a windowed multiplication reads again.
      reread_bytes: bytes that it reads and writes again per execution, in device memory; not in
        `bytes`.
    """

    operation: str
    source: str
    region: str
    in_loop: bool
    count: float
    bytes: float
    flops: float
    matmul_s: float
    ideal_s: float
    memory_s: float
    ring_s: float
    overhead_s: float
    matmul: tuple[int, int, int, int]
    cut_axes: tuple[str, ...]
    repeated_axes: tuple[str, ...]
    repeats: int
    reread_s: float = 0.0
    reread_bytes: float = 0.0

    @property
    def window_s(self) -> float:
        """Seconds of extra memory traffic of a ring that its multiplication does not hide."""
        alone_s = max(self.matmul_s, self.memory_s - self.reread_s)
        return self.ring_s + max(self.matmul_s, self.memory_s) - alone_s

    @property
    def moved_bytes(self) -> float:
        """Bytes read and written in device memory per execution, including repeats of a ring."""
        return self.bytes + self.reread_bytes

    @property
    def is_memory_bound(self) -> bool:
        return self.memory_s > self.matmul_s

    @property
    def seconds(self) -> float:
        return max(self.matmul_s, self.memory_s) + self.ring_s + self.overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCost:
    """Copies of one source line between a device and its host; seconds as if nothing else ran.

    Attributes:
      count: executions per step.
      bytes: of one execution.
    """

    is_to_host: bool
    source: str
    count: float
    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCost:
    """A step on one mesh in pieces, the most expensive first.

    Attributes:
      sizes: every active axis with its size, in the order of the mesh.
      peak_temporary_bytes: temporaries at the point of the program where they take most memory.
      peak_source: source line of that point, or empty.
      argument_bytes, output_bytes, alias_bytes: on one device; `alias` is the part of the arguments
        whose memory outputs reuse.
      findings: unexpected costs of memory or time.
      first_bytes: memory of the first step on one device, if that is another program; else 0.
      platform: whose compiler makes the program.
    """

    sizes: tuple[tuple[str, int], ...]
    collectives: tuple[CollectiveCost, ...]
    kernels: tuple[KernelSum, ...]
    peak_temporary_bytes: float
    peak_source: str
    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    uncounted: tuple[Uncounted, ...]
    host: tuple[HostCost, ...] = ()
    findings: tuple[Finding, ...] = ()
    first_bytes: float = 0.0
    platform: str = ""

    @property
    def host_bytes(self) -> float:
        """Bytes that one device copies to and from its host in a step."""
        return sum(copy.count * copy.bytes for copy in self.host)

    @property
    def ring_s(self) -> float:
        """Seconds in which windowed multiplications read and write activations again."""
        return sum(kernel.window_s for kernel in self.kernels)

    @property
    def flops(self) -> float:
        """FLOPs of all multiplications of a step on one device."""
        return sum(kernel.flops * kernel.count for kernel in self.kernels)

    @property
    def memory_traffic_bytes(self) -> float:
        """Bytes read and written in device memory in a step on one device."""
        return sum(kernel.moved_bytes * kernel.count for kernel in self.kernels)

    def collective_bytes(self, axes: tuple[str, ...]) -> float:
        """Returns the bytes of all collectives over `axes` in a step on one device; see
        `CollectiveCost.device_bytes`."""
        return sum(
            collective.device_bytes * collective.count
            for collective in self.collectives
            if collective.axes == axes
        )


def break_down(terms: Terms, batch: Batch, *, routes_of: RoutesOf, speeds: Speeds) -> MeshCost:
    """Prices every piece of a step on one mesh.

    Args:
      terms: of the set of axes that are larger than 1.
      batch: of this mesh alone.
      routes_of: see `pricing.price_on`.
    """
    sizes = dict(zip(batch.names, batch.sizes[0].tolist(), strict=True))
    points = [(value_of(point.bytes, sizes), point.source) for point in terms.points]
    peak_bytes, peak_source = max(points, default=(0.0, ""), key=lambda point: point[0])
    peak_bytes = _with_copies(peak_bytes, terms, sizes)
    collectives = _merged(_collectives(terms, batch, sizes, routes_of, speeds))
    kernels = list(_kernels(terms, batch, sizes, speeds))
    work_s = sum(one.seconds for one in collectives) + sum(one.seconds for one in kernels)
    return MeshCost(
        sizes=tuple((axis, sizes[axis]) for axis in terms.active),
        collectives=tuple(sorted(collectives, key=lambda collective: -collective.seconds)),
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.seconds)),
        peak_temporary_bytes=peak_bytes,
        peak_source=peak_source,
        argument_bytes=value_of(terms.argument_bytes, sizes),
        output_bytes=value_of(terms.output_bytes, sizes),
        alias_bytes=value_of(terms.alias_bytes, sizes),
        uncounted=terms.uncounted,
        host=tuple(sorted(_host(terms, batch, speeds), key=lambda copy: -copy.seconds)),
        platform=terms.platform,
        findings=(
            *(one for one in terms.findings if one.is_on(sizes)),
            *_over_dcn(terms, collectives, work_s),
        ),
        first_bytes=peak_of(terms.first, sizes) if terms.first is not None else 0.0,
    )


def _over_dcn(
    terms: Terms, collectives: Sequence[CollectiveCost], work_s: float
) -> Iterator[Finding]:
    """Finds axes that cross the network although they do not split the batch. The finding has the
    line of the slowest collective.

    Data-parallel axes send gradients once a step, and are meant to cross DCN. An axis that splits
    weights or a sequence sends activations in every layer, forth and back. Nothing is found while
    it is unknown which axes split the batch.

    Args:
      collectives: priced on the mesh in question.
      work_s: seconds of the step if nothing overlaps; an axis counts from a hundredth of them.
    """
    crossing = [one for one in collectives if one.granules > 1 and one.dcn_s > 0]
    if not terms.batch_axes:
        return
    for axis in terms.active:
        mine = [one for one in crossing if axis in one.axes]
        mine = [one for one in mine if not set(one.axes) & set(terms.batch_axes)]
        over_s = sum(one.dcn_s for one in mine)
        if axis in terms.batch_axes or not mine or over_s < _LEAST_OVER_DCN * work_s:
            continue
        slowest = max(mine, key=lambda one: one.dcn_s)
        count = sum(one.count for one in mine)
        sent = sum(one.count * one.payload_bytes for one in mine)
        yield Finding(
            rule=AXIS_OVER_DCN,
            array="activations",
            bytes=(Monomial(coefficient=sent / count),),
            axes=(axis,),
            count=(Monomial(coefficient=count),),
            source=slowest.source,
            detail=f"{slowest.granules} {format_seconds(over_s)}",
        )


def peak_of(footprint: Footprint, sizes: Mapping[str, int]) -> float:
    """Returns the peak bytes on one mesh: arguments, outputs without reused memory, and most
    temporaries."""
    temporaries = max((value_of(point.bytes, sizes) for point in footprint.points), default=0.0)
    temporaries = _with_copies(temporaries, footprint, sizes)
    lasting = value_of(footprint.argument_bytes, sizes) + value_of(footprint.output_bytes, sizes)
    return lasting - value_of(footprint.alias_bytes, sizes) + temporaries


def _with_copies(
    temporaries: float, footprint: Terms | Footprint, sizes: Mapping[str, int]
) -> float:
    reread = value_of(footprint.reread_bytes, sizes)
    both = with_copies(np.array(temporaries), np.array(reread), footprint.on_chip_bytes)
    return float(both)


def _host(terms: Terms, batch: Batch, speeds: Speeds) -> Iterable[HostCost]:
    formulas = Formulas(terms.active)
    link = HostLink(terms, formulas)
    row = _sizes(terms, batch)
    each = link.each_s(formulas.values(row), speeds)[:, 0]
    sizes = dict(zip(terms.active, row[0].tolist(), strict=True))
    for copy, seconds in zip(link.copies, each.tolist(), strict=True):
        yield HostCost(
            is_to_host=copy.is_to_host,
            source=copy.source,
            count=value_of(copy.count, sizes),
            bytes=value_of(copy.bytes, sizes),
            seconds=seconds,
        )


def _sizes(terms: Terms, batch: Batch) -> Sizes:
    """Returns the sizes of the active axes: [1, axes]."""
    return batch.sizes[:, [batch.names.index(axis) for axis in terms.active]]


def _collectives(
    terms: Terms, batch: Batch, sizes: Mapping[str, int], routes_of: RoutesOf, speeds: Speeds
) -> Iterable[CollectiveCost]:
    first = np.zeros(1, np.intp)
    here = PlanRoutes(ici=first, dcn=first, size=first)
    pieces = pieces_of_groups(
        Collectives(for_windows(terms, speeds), Formulas(terms.active)),
        _sizes(terms, batch),
        here,
        RouteTable(batch, routes_of),
        speeds,
    )
    known = {
        member.work: (member, int(pairs.of(here, slice(None))[0]), pairs)
        for pairs, members in pieces
        for member in members
    }
    for term in terms.collectives:
        work = collective_demand.unnamed(term, terms.active)
        if not work.axes:  # every group is one device
            continue
        piece, pair, pairs = known[work]
        is_ring = bool(piece.is_ring[pair])
        count = value_of(term.count, sizes)
        latency, ici, dcn = (count * float(each) for each in piece.seconds[:, pair])
        yield CollectiveCost(
            kind=term.kind,
            axes=work.axes,
            source=term.source,
            operand=term.operand,
            region=terms.regions[term.region].name,
            in_loop=_is_loop(terms, term.region),
            count=count,
            payload_bytes=float(piece.payload_bytes[pair]),
            group_size=math.prod(sizes[axis] for axis in work.axes),
            latency_s=latency,
            ici_s=ici,
            dcn_s=dcn,
            exposed=0.0 if term.hides or is_ring else 1.0,
            granules=round(float(pairs.axis_routes.routes.dcn_size[pairs.route[pair]])),
            is_ring=is_ring,
        )


def _merged(costs: Iterable[CollectiveCost]) -> list[CollectiveCost]:
    """Merges collectives that only differ in the place where the program repeats them."""
    kept: dict[tuple[object, ...], CollectiveCost] = {}
    for cost in costs:
        key = (
            *(cost.kind, cost.axes, cost.source, cost.operand),
            *(cost.region, cost.payload_bytes, cost.is_ring),
        )
        there = kept.get(key)
        kept[key] = cost if there is None else _added(there, cost)
    return list(kept.values())


def _added(one: CollectiveCost, other: CollectiveCost) -> CollectiveCost:
    count = one.count + other.count
    exposed = (one.exposed * one.count + other.exposed * other.count) / count if count else 1.0
    return replace(
        one,
        count=count,
        exposed=exposed,
        latency_s=one.latency_s + other.latency_s,
        ici_s=one.ici_s + other.ici_s,
        dcn_s=one.dcn_s + other.dcn_s,
    )


def _kernels(
    terms: Terms, batch: Batch, sizes: Mapping[str, int], speeds: Speeds
) -> Iterable[KernelSum]:
    formulas = Formulas(terms.active)
    priced = DistinctKernels(for_windows(terms, speeds), formulas)
    row = _sizes(terms, batch)
    pieces = priced.pieces(formulas.values(row), row, speeds)
    places = {work: place for place, work in enumerate(priced.works)}
    dtypes = {matmul.dtype for kernel in terms.kernels for matmul in kernel.matmuls}
    rates = {dtype: _large_rate(speeds, dtype) for dtype in dtypes}
    for kernel in terms.kernels:
        place = places[kernels.unnamed(kernel)]
        yield _kernel(terms, kernel, pieces, place, sizes, speeds, rates)


def _kernel(
    terms: Terms,
    kernel: Kernel,
    pieces: KernelPieces,
    place: int,
    sizes: Mapping[str, int],
    speeds: Speeds,
    rates: Mapping[str, float],
) -> KernelSum:
    count = value_of(kernel.count, sizes)
    streaming_s = float(pieces.streaming_s[place, 0] + pieces.read_again_s[place, 0])
    largest = max(kernel.matmuls, key=lambda matmul: flops([matmul], sizes), default=None)
    repeated = tuple(axis for axis in terms.active if _repeats(terms, kernel, axis, sizes))
    return KernelSum(
        operation=kernel.operation,
        source=kernel.source,
        region=terms.regions[kernel.region].name,
        in_loop=_is_loop(terms, kernel.region),
        count=count,
        bytes=float(pieces.far_bytes[place, 0]),
        flops=flops(kernel.matmuls, sizes),
        matmul_s=count * float(pieces.multiplying_s[place, 0]),
        ideal_s=count
        * sum(flops([matmul], sizes) / rates[matmul.dtype] for matmul in kernel.matmuls),
        memory_s=count * streaming_s,
        ring_s=count * float(pieces.added_again_s[place, 0]),
        overhead_s=count * speeds.kernel_overhead_s,
        matmul=_shape(largest, sizes) if largest else (0, 0, 0, 0),
        cut_axes=_cut_axes(largest, terms.active, sizes) if largest else (),
        repeated_axes=repeated,
        repeats=math.prod(sizes[axis] for axis in repeated),
        reread_s=count * float(pieces.read_again_s[place, 0]),
        reread_bytes=speeds.memory_bytes_per_s
        * float(pieces.read_again_s[place, 0] + pieces.added_again_s[place, 0]),
    )


def _large_rate(speeds: Speeds, dtype: str) -> float:
    """Returns the FLOP/s of a multiplication that is large in every dimension."""
    side, one = np.array([_LARGE]), np.ones(1)
    return 2 * _LARGE**3 / float(speeds.matmul_s(dtype, one, side, side, side)[0])


def _shape(one: Matmul, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    batch, m, n, k = (max(round(side.at(sizes)), 1) for side in (one.batch, one.m, one.n, one.k))
    return batch, m, n, k


def _cut_axes(one: Matmul, active: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    smallest = min((one.m, one.n, one.k), key=lambda side: side.at(sizes))
    cuts = {axis for axis, power in smallest.powers if power < 0 and sizes.get(axis, 1) > 1}
    return tuple(axis for axis in active if axis in cuts)


def _repeats(terms: Terms, kernel: Kernel, axis: str, sizes: Mapping[str, int]) -> bool:
    """Whether a kernel multiplies the same on every device along an axis."""
    # If sizes are baked into shapes, the powers of the formulas do not show the dependence.
    if not kernel.matmuls or axis in terms.fixed or sizes[axis] == 1:
        return False
    alone = {**sizes, axis: 1}
    now, before = (value_of(kernel.count, at) * flops(kernel.matmuls, at) for at in (sizes, alone))
    return now > 0.999 * before


def _is_loop(terms: Terms, region: int) -> bool:
    return terms.regions[region].name != "step"
