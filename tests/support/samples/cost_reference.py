"""Pricing again, one plan at a time and in plain Python: what the arrays must agree with."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from automesh.cost.terms import CollectiveTerm, Kernel, Monomial, Terms, value_of
from automesh.cost.windowed import LARGEST_RING, SMALLEST_RING
from automesh.hardware.calibration.speeds import CollectiveSeconds
from automesh.mesh.plan_arrays import Batch
from tests.support.samples.cost_samples import PlainSpeeds, simple_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    step_s: float
    lower_s: float
    upper_s: float
    bound_s: float
    memory_bytes: int
    collectives: float
    causes: dict[str, float]


def reference(terms: Terms, batch: Batch, row: int, speeds: PlainSpeeds) -> Reference:
    """Prices one mesh of a batch."""
    terms = replace(terms, window_flops_per_byte=speeds.window_flops_per_byte)
    sizes = dict(zip(batch.names, batch.sizes[row].tolist()))
    causes: dict[str, float] = defaultdict(float)
    least = serial = step = multiplying_at_peak = touched = executed = 0.0
    alone: dict[str, float] = defaultdict(float)
    behind: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    copying, waited = _copies(terms, sizes, speeds)
    serial += copying
    for region in range(len(terms.regions)):
        compute = in_rings = 0.0
        for kernel in terms.kernels:
            if kernel.region == region:
                seconds = _kernel(kernel, terms, sizes, speeds)
                compute += seconds.central
                in_rings += seconds.central if seconds.is_windowed else 0.0
                least += seconds.least
                serial += seconds.serial
                multiplying_at_peak += seconds.at_peak
                touched += seconds.bytes
                causes[seconds.cause] += seconds.larger
                causes["memory"] += seconds.rings
                causes["latency"] += seconds.overhead
        compute += waited[region]
        causes["host"] += waited[region]
        exposed: dict[str, float] = defaultdict(float)
        hidden: dict[bool, dict[str, float]] = {False: defaultdict(float), True: defaultdict(float)}
        for term, shown, beside, slower, is_ring in _communication(terms, region, sizes):
            axes = tuple(axis for axis in term.axes if sizes[axis] > 1)
            pieces = _collective(term, batch, row, axes, speeds)
            executed += shown + beside
            ring = _ring(term, batch, row, axes, speeds)
            taken = ring if is_ring else pieces
            alone["+".join(axes)] += (shown + beside) * sum(taken.values())
            for cause, seconds in pieces.items():
                exposed[cause] += shown * slower * seconds
                beside_s = beside * (ring[cause] if is_ring else slower * seconds)
                hidden[is_ring][cause] += beside_s
                behind["+".join(axes)][cause] += beside_s
        serial += sum(exposed.values())
        step += compute + sum(exposed.values())
        for cause, seconds in exposed.items():
            causes[cause] += seconds
        for is_ring, beside_s in ((False, compute), (True, in_rings)):
            wanted = sum(hidden[is_ring].values())
            left = max(wanted - beside_s, 0.0)
            step += left
            serial += wanted
            for cause, seconds in hidden[is_ring].items():
                causes[cause] += seconds * left / wanted if wanted else 0.0
    least = max(least, copying)
    # What hides behind the same compute over the same axes waits for each other all the same.
    busiest = max(alone, key=alone.__getitem__, default="")
    missing = max([least, *alone.values()]) - step
    if missing > 0.0:
        step += missing
        wanted = sum(behind[busiest].values())
        for cause, seconds in behind[busiest].items():
            causes[cause] += missing * seconds / wanted if wanted else 0.0
    arguments = value_of(terms.argument_bytes, sizes)
    through_memory = min(round(arguments), touched) / speeds.bound_memory_bytes_per_s
    reread = value_of(terms.reread_bytes, sizes)
    temporaries = max((value_of(point.bytes, sizes) for point in terms.points), default=0.0)
    memory = (
        arguments
        + max(temporaries, min(temporaries + reread, terms.on_chip_bytes))
        + value_of(terms.output_bytes, sizes)
        - value_of(terms.alias_bytes, sizes)
    )
    return Reference(
        step_s=step,
        lower_s=max([least, *alone.values()]),
        upper_s=serial,
        bound_s=max(multiplying_at_peak, through_memory),
        memory_bytes=round(memory),
        collectives=executed,
        causes=causes,
    )


def _copies(
    terms: Terms, sizes: dict[str, int], speeds: PlainSpeeds
) -> tuple[float, dict[int, float]]:
    """Seconds of all copies to and from the host, and what each region waits for them."""
    beside: dict[tuple[int, ...], float] = defaultdict(float)
    for copy in terms.host_transfers:
        moved = value_of(copy.count, sizes) * value_of(copy.bytes, sizes)
        beside[copy.regions] += moved / speeds.host_bytes_per_s
    waited: dict[int, float] = defaultdict(float)
    for regions, wanted in beside.items():
        kernels = [one for one in terms.kernels if one.region in regions]
        hidden = sum(_kernel(one, terms, sizes, speeds).central for one in kernels)
        waited[regions[-1]] += max(wanted - hidden, 0.0)
    return sum(beside.values()), waited


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    cause: str
    larger: float
    least: float
    rings: float
    is_windowed: bool
    overhead: float
    serial: float
    at_peak: float
    bytes: float

    @property
    def central(self) -> float:
        return self.larger + self.overhead + self.rings


def _kernel(kernel: Kernel, terms: Terms, sizes: dict[str, int], speeds: PlainSpeeds) -> _Kernel:
    count = value_of(kernel.count, sizes)
    kept = sum(
        value_of(one.bytes, sizes)
        for one in kernel.near
        if one.buffer_bytes.at(sizes) <= speeds.near_bytes
    )
    streaming = (value_of(kernel.bytes, sizes) - kept) / speeds.memory_bytes_per_s
    multiplying = at_peak = 0.0
    for one in kernel.matmuls:
        batch, m, n, k = (_at(side, sizes) for side in (one.batch, one.m, one.n, one.k))
        multiplying += float(speeds.matmul_s(one.dtype, batch, m, n, k)[0])
        bound = speeds.bound_flops_per_s(one.dtype)
        at_peak += float((2.0 * batch * m * n * k)[0]) / bound if bound else 0.0
    if speeds.epilogue_bytes_per_s:
        epilogue = value_of(kernel.epilogue, sizes) / speeds.epilogue_bytes_per_s
        multiplying = max(multiplying, epilogue)
    rings, is_windowed = 0.0, False
    least = max(multiplying, streaming)
    for one in kernel.windowed:
        ring = math.prod(sizes[axis] for axis in one.axes)
        whole, intensity = (value_of(each, sizes) for each in (one.whole_bytes, one.intensity))
        if _is_ring(terms, ring, whole, intensity):
            is_windowed = True
            buffer_bytes = value_of(one.buffer_bytes, sizes)
            stays = 0.0 < buffer_bytes <= speeds.near_bytes
            moved = 0.0 if stays else value_of(one.bytes, sizes)
            again = ((ring + 1) // 2 - 1) * moved / speeds.memory_bytes_per_s
            rings += again if one.adds else 0.0
            streaming += 0.0 if one.adds else again
    overhead = count * speeds.kernel_overhead_s
    return _Kernel(
        cause="compute" if multiplying >= streaming else "memory",
        larger=count * max(multiplying, streaming),
        least=count * least + overhead,
        rings=count * rings,
        is_windowed=is_windowed,
        overhead=overhead,
        serial=count * (multiplying + streaming + rings + kept / speeds.memory_bytes_per_s)
        + overhead,
        at_peak=count * at_peak,
        bytes=count * value_of(kernel.bytes, sizes),
    )


def _at(side: Monomial, sizes: dict[str, int]) -> np.ndarray:
    return np.array([side.at(sizes)])


def _communication(
    terms: Terms, region: int, sizes: dict[str, int]
) -> list[tuple[CollectiveTerm, float, float, float, bool]]:
    """Each collective of one region: exposed and hidden executions, slow-down, if it is a ring."""
    found = []
    counts: dict[CollectiveTerm, float] = defaultdict(float)
    for term in terms.collectives:  # equal ones, listed twice, are one that is executed more often
        counts[replace(term, count=())] += value_of(term.count, sizes)
    for term, count in counts.items():
        ring = math.prod(sizes[axis] for axis in term.axes)
        whole = value_of(term.whole_bytes, sizes)
        intensity = value_of(term.intensity, sizes)
        windowed = term.windowed and _is_ring(terms, ring, whole, intensity)
        elsewhere = windowed and term.ring_region is not None
        where = term.ring_region if elsewhere else term.region
        if where != region or not any(sizes[axis] > 1 for axis in term.axes):
            continue
        hides = term.hides or windowed
        shown = 0.0 if hides else count
        whole_mesh = ring == math.prod(sizes.values()) and term.kind == "reduce-scatter"
        other = 2.0 if whole_mesh and terms.platform == "tpu" else 1.0
        found.append((term, shown, count - shown, 1.0 if windowed else other, windowed))
    return found


def _ring(
    term: CollectiveTerm, batch: Batch, row: int, axes: tuple[str, ...], speeds: PlainSpeeds
) -> dict[str, float]:
    """Seconds of all permutes of a ring by cause, two at a time."""
    alone = Batch(names=batch.names, ici=batch.ici[row : row + 1], dcn=batch.dcn[row : row + 1])
    devices = math.prod(int(batch.sizes[row][batch.names.index(axis)]) for axis in axes)
    route = simple_routes(alone, axes)
    route = replace(route, ici_step_share=route.ici_pair_share)
    sizes = dict(zip(batch.names, batch.sizes[row].tolist()))
    shard = np.array([value_of(term.payload_bytes, sizes) / devices])
    seconds = speeds.collective_s("collective-permute", shard, route)
    return _by_cause(axes, seconds, times=(devices + 1) / 2)


def _is_ring(terms: Terms, ring: int, whole_bytes: float, intensity: float) -> bool:
    is_large = whole_bytes >= terms.window_threshold_bytes
    pays = intensity * ring >= terms.window_flops_per_byte
    return terms.platform == "tpu" and SMALLEST_RING <= ring <= LARGEST_RING and is_large and pays


def _collective(
    term: CollectiveTerm, batch: Batch, row: int, axes: tuple[str, ...], speeds: PlainSpeeds
) -> dict[str, float]:
    """Seconds of one execution by cause."""
    sizes = dict(zip(batch.names, batch.sizes[row].tolist()))
    alone = Batch(names=batch.names, ici=batch.ici[row : row + 1], dcn=batch.dcn[row : row + 1])
    payload = np.array([value_of(term.payload_bytes, sizes)])
    seconds = speeds.collective_s(term.kind, payload, simple_routes(alone, axes))
    return _by_cause(axes, seconds)


def _by_cause(
    axes: tuple[str, ...], seconds: CollectiveSeconds, times: float = 1.0
) -> dict[str, float]:
    name = "+".join(axes)
    return {
        "latency": times * float(seconds.latency_s[0]),
        f"ici {name}": times * float(seconds.ici_s[0]),
        f"dcn {name}": times * float(seconds.dcn_s[0]),
    }
