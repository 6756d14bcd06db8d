"""One mesh of a step in its pieces: what every collective and every kernel costs there (no jax).

Pricing adds pieces up for thousands of meshes; this keeps them apart for one. Every time here is of
the piece alone, as if nothing ran beside it: what overlaps is in `Estimated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from automesh.collectives import priced_as
from automesh.cost.collective_demand import whole_sum_cost
from automesh.cost.kernels import stays
from automesh.cost.terms import (
    Kernel,
    Matmul,
    Monomial,
    Near,
    Sum,
    Terms,
    Uncounted,
    Windowed,
    value_of,
)
from automesh.cost.windowed import repeats, ring_seconds, windows
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Floats, Route

# A multiplication that keeps any known device busy: what smaller ones are compared with.
_LARGE = 8192.0

RouteOf = Callable[[tuple[str, ...]], Route]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Equal collectives of one source line on one mesh; seconds are of all executions of a step.

    Attributes:
      region: where it runs: `step`, or the loop that it stands in.
      in_loop: True if `region` is a loop.
      count: executions per step.
      payload_bytes: of one execution: the full array of one group, see `CollectiveTerm`.
      latency_s, ici_s, dcn_s: by cause.
      exposed: part of the executions that no compute can hide.
      granules: how many its groups span; more than 1 means that it crosses DCN.
      is_ring: True if it is no such collective, but the ring of a windowed multiplication.
    """

    kind: str
    axes: tuple[str, ...]
    source: str
    operand: str
    region: str
    in_loop: bool
    count: float
    payload_bytes: float
    latency_s: float
    ici_s: float
    dcn_s: float
    exposed: float
    granules: int
    is_ring: bool = False

    @property
    def seconds(self) -> float:
        return self.latency_s + self.ici_s + self.dcn_s


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """One kernel on one mesh; seconds are of all executions of a step.

    Attributes:
      count: executions per step.
      bytes: read and written in device memory per execution; what stays on the chip left out.
      flops: of the multiplications of one execution.
      matmul_s: the multiplications at the speed that their sizes allow.
      ideal_s: the multiplications at the speed of large ones.
      memory_s: the bytes at the speed of device memory, with what a windowed multiplication reads
        again while it multiplies.
      ring_s: what a windowed multiplication adds to again, at the speed of device memory.
      overhead_s: of starting it.
      matmul: local `(batch, m, n, k)` of its largest multiplication; zeros if it has none.
      cut_axes: mesh axes that make the smallest of m, n, k smaller.
      repeated_axes: axes larger than 1 along which all devices do the same multiplications.
      repeats: product of the sizes of `repeated_axes`.
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

    @property
    def is_memory_bound(self) -> bool:
        return self.memory_s > self.matmul_s

    @property
    def seconds(self) -> float:
        return max(self.matmul_s, self.memory_s) + self.ring_s + self.overhead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCost:
    """A step on one mesh in pieces, the most expensive first.

    Attributes:
      sizes: every active axis with its size, in the order of the mesh.
      peak_temporary_bytes: temporaries at the point of the program where most of them live.
      peak_source: where that point is, or empty.
      argument_bytes, output_bytes, alias_bytes: on one device; `alias` is what outputs take over.
    """

    sizes: tuple[tuple[str, int], ...]
    collectives: tuple[CollectiveCost, ...]
    kernels: tuple[KernelCost, ...]
    peak_temporary_bytes: float
    peak_source: str
    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    uncounted: tuple[Uncounted, ...]

    @property
    def ring_s(self) -> float:
        """What windowed multiplications spend on reading and writing activations again."""
        return sum(one.ring_s for one in self.kernels)

    @property
    def flops(self) -> float:
        """Of all multiplications of a step on one device."""
        return sum(one.flops * one.count for one in self.kernels)

    @property
    def memory_traffic_bytes(self) -> float:
        """Read and written in device memory in a step on one device."""
        return sum(one.bytes * one.count for one in self.kernels)

    def payload_bytes(self, axes: tuple[str, ...]) -> float:
        """Moved by all collectives over `axes` in a step, arrays counted in full."""
        return sum(one.payload_bytes * one.count for one in self.collectives if one.axes == axes)


def break_down(
    terms: Terms, sizes: Mapping[str, int], *, speeds: Speeds, route_of: RouteOf
) -> MeshCost:
    """Prices every piece of a step on one mesh.

    Args:
      terms: of the set of axes that are larger than 1 in `sizes`.
      sizes: of all mesh axes.
      route_of: how a set of axes lies on the wires of this mesh; every field has one entry.
    """
    collectives = _merged(_collectives(terms, sizes, speeds, route_of))
    dtypes = {one.dtype for kernel in terms.kernels for one in kernel.matmuls}
    rates = {dtype: _large_rate(speeds, dtype) for dtype in dtypes}
    kernels = [_kernel(terms, kernel, sizes, speeds, rates) for kernel in terms.kernels]
    points = [(value_of(point.bytes, sizes), point.source) for point in terms.points]
    peak_bytes, peak_source = max(points, default=(0.0, ""), key=lambda point: point[0])
    return MeshCost(
        sizes=tuple((axis, sizes[axis]) for axis in terms.active),
        collectives=tuple(sorted(collectives, key=lambda one: -one.seconds)),
        kernels=tuple(sorted(kernels, key=lambda one: -one.seconds)),
        peak_temporary_bytes=peak_bytes,
        peak_source=peak_source,
        argument_bytes=value_of(terms.argument_bytes, sizes),
        output_bytes=value_of(terms.output_bytes, sizes),
        alias_bytes=value_of(terms.alias_bytes, sizes),
        uncounted=terms.uncounted,
    )


def _collectives(
    terms: Terms, sizes: Mapping[str, int], speeds: Speeds, route_of: RouteOf
) -> Iterable[CollectiveCost]:
    for term in terms.collectives:
        axes = tuple(axis for axis in terms.active if axis in term.axes)
        if not axes:  # every group is one device
            continue
        ring = math.prod(sizes[axis] for axis in axes)
        is_ring = term.windowed and _is_ring(terms, ring, term.whole_bytes, sizes)
        count = value_of(term.count, sizes)
        exposed = 0.0 if term.hides or is_ring else 1.0
        payload = value_of(term.payload_bytes, sizes)
        route = route_of(axes)
        if is_ring:
            latency, ici, dcn = (
                float(one[0]) for one in ring_seconds(_one(payload), route, speeds)
            )
        else:
            each = speeds.collective_s(priced_as(term.kind), _one(payload), route)
            slower = whole_sum_cost(terms, term.kind, axes)
            latency, ici, dcn = (
                slower * float(one[0]) for one in (each.latency_s, each.ici_s, each.dcn_s)
            )
        yield CollectiveCost(
            kind=term.kind,
            axes=axes,
            source=term.source,
            operand=term.operand,
            region=terms.regions[term.region].name,
            in_loop=_is_loop(terms, term.region),
            count=count,
            payload_bytes=payload,
            latency_s=count * latency,
            ici_s=count * ici,
            dcn_s=count * dcn,
            exposed=exposed,
            granules=round(float(route.dcn_size[0])),
            is_ring=is_ring,
        )


def _merged(costs: Iterable[CollectiveCost]) -> list[CollectiveCost]:
    """One entry for collectives that differ in nothing but where the program repeats them."""
    kept: dict[tuple[object, ...], CollectiveCost] = {}
    for one in costs:
        key = (
            *(one.kind, one.axes, one.source, one.operand),
            *(one.region, one.payload_bytes, one.is_ring),
        )
        there = kept.get(key)
        kept[key] = one if there is None else _added(there, one)
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


def _kernel(
    terms: Terms,
    kernel: Kernel,
    sizes: Mapping[str, int],
    speeds: Speeds,
    rates: Mapping[str, float],
) -> KernelCost:
    count, moved = value_of(kernel.count, sizes), value_of(kernel.bytes, sizes)
    kept = sum(value_of(one.bytes, sizes) for one in kernel.near if _stays(one, sizes, speeds))
    added, read = (
        sum(_ring_bytes(terms, one, sizes, speeds) for one in kernel.windowed if one.adds is adds)
        for adds in (True, False)
    )
    largest = max(kernel.matmuls, key=lambda one: _flops(one, sizes), default=None)
    repeated = tuple(axis for axis in terms.active if _repeats(terms, kernel, axis, sizes))
    return KernelCost(
        operation=kernel.operation,
        source=kernel.source,
        region=terms.regions[kernel.region].name,
        in_loop=_is_loop(terms, kernel.region),
        count=count,
        bytes=moved - kept,
        flops=sum(_flops(one, sizes) for one in kernel.matmuls),
        matmul_s=count * _multiplying_s(kernel, sizes, speeds),
        ideal_s=count * sum(_flops(one, sizes) / rates[one.dtype] for one in kernel.matmuls),
        memory_s=count * (moved - kept + read) / speeds.memory_bytes_per_s,
        ring_s=count * added / speeds.memory_bytes_per_s,
        overhead_s=count * speeds.kernel_overhead_s,
        matmul=_shape(largest, sizes) if largest else (0, 0, 0, 0),
        cut_axes=_cut_axes(largest, terms.active, sizes) if largest else (),
        repeated_axes=repeated,
        repeats=math.prod(sizes[axis] for axis in repeated),
    )


def _large_rate(speeds: Speeds, dtype: str) -> float:
    """FLOP/s of a multiplication that is large in every dimension."""
    side = _one(_LARGE)
    return 2 * _LARGE**3 / float(speeds.matmul_s(dtype, _one(1.0), side, side, side)[0])


def _stays(one: Near, sizes: Mapping[str, int], speeds: Speeds) -> bool:
    return bool(stays(_one(one.buffer_bytes.at(sizes)), speeds)[0])


def _ring_bytes(terms: Terms, one: Windowed, sizes: Mapping[str, int], speeds: Speeds) -> float:
    ring = math.prod(sizes.get(axis, 1) for axis in one.axes)
    buffer_bytes = value_of(one.buffer_bytes, sizes)
    if buffer_bytes and stays(_one(buffer_bytes), speeds)[0]:
        return 0.0
    is_ring = _is_ring(terms, ring, one.whole_bytes, sizes)
    return float(repeats(_one(ring))[0]) * value_of(one.bytes, sizes) if is_ring else 0.0


def _is_ring(terms: Terms, ring: int, whole_bytes: Sum, sizes: Mapping[str, int]) -> bool:
    return bool(windows(terms, _one(ring), _one(value_of(whole_bytes, sizes)))[0])


def _matmul_s(one: Matmul, sizes: Mapping[str, int], speeds: Speeds) -> float:
    batch, m, n, k = (_one(side.at(sizes)) for side in _sides(one))
    return float(speeds.matmul_s(one.dtype, batch, m, n, k)[0])


def _multiplying_s(kernel: Kernel, sizes: Mapping[str, int], speeds: Speeds) -> float:
    multiplying = sum(_matmul_s(one, sizes, speeds) for one in kernel.matmuls)
    if not speeds.epilogue_bytes_per_s:
        return multiplying
    return max(multiplying, value_of(kernel.epilogue, sizes) / speeds.epilogue_bytes_per_s)


def _flops(one: Matmul, sizes: Mapping[str, int]) -> float:
    batch, m, n, k = (side.at(sizes) for side in _sides(one))
    return 2 * batch * m * n * k


def _shape(one: Matmul, sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
    batch, m, n, k = (max(round(side.at(sizes)), 1) for side in _sides(one))
    return batch, m, n, k


def _sides(one: Matmul) -> tuple[Monomial, Monomial, Monomial, Monomial]:
    return one.batch, one.m, one.n, one.k


def _cut_axes(one: Matmul, active: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    smallest = min((one.m, one.n, one.k), key=lambda side: side.at(sizes))
    cuts = {axis for axis, power in smallest.powers if power < 0 and sizes.get(axis, 1) > 1}
    return tuple(axis for axis in active if axis in cuts)


def _repeats(terms: Terms, kernel: Kernel, axis: str, sizes: Mapping[str, int]) -> bool:
    """Whether more devices along an axis take none of a kernel's multiplications away."""
    # Where sizes are baked into shapes the powers say nothing.
    if not kernel.matmuls or axis in terms.fixed or sizes[axis] == 1:
        return False
    alone = {**sizes, axis: 1}
    now, before = (
        value_of(kernel.count, at) * sum(_flops(one, at) for one in kernel.matmuls)
        for at in (sizes, alone)
    )
    return now > 0.999 * before


def _is_loop(terms: Terms, region: int) -> bool:
    return terms.regions[region].name != "step"


def _one(value: float) -> Floats:
    return np.array([value], np.float64)
