"""Pricing again, one plan at a time and in plain Python: what the arrays must agree with."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from automesh.cost.terms import CollectiveTerm, Kernel, Monomial, Terms, value_of
from automesh.cost.windowed import PERMUTE_COST, SMALLEST_RING
from automesh.mesh.batch import Batch
from tests.cost_samples import PlainSpeeds, simple_routes


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
    sizes = dict(zip(batch.names, batch.sizes[row].tolist()))
    causes: dict[str, float] = defaultdict(float)
    least = serial = step = multiplying_at_peak = touched = executed = 0.0
    alone: dict[str, float] = defaultdict(float)
    for region in range(len(terms.regions)):
        compute = 0.0
        for kernel in terms.kernels:
            if kernel.region == region:
                seconds = _kernel(kernel, terms, sizes, speeds)
                compute += seconds.central
                least += seconds.least
                serial += seconds.serial
                multiplying_at_peak += seconds.at_peak
                touched += seconds.bytes
                causes[seconds.cause] += seconds.larger
                causes["memory"] += seconds.rings
                causes["latency"] += seconds.overhead
        hidden: dict[str, float] = defaultdict(float)
        exposed: dict[str, float] = defaultdict(float)
        for term, shown, beside, slower in _communication(terms, region, sizes):
            axes = tuple(axis for axis in term.axes if sizes[axis] > 1)
            pieces = _collective(term, batch, row, axes, speeds)
            executed += shown + beside
            for cause, seconds in pieces.items():
                exposed[cause] += shown * seconds
                hidden[cause] += beside * slower * seconds
            alone["+".join(axes)] += (shown + beside) * sum(pieces.values())
        wanted = sum(hidden.values())
        step += max(compute, wanted) + sum(exposed.values())
        serial += wanted + sum(exposed.values())
        share = max(wanted - compute, 0.0) / wanted if wanted else 0.0
        for cause in hidden:
            causes[cause] += exposed[cause] + share * hidden[cause]
    arguments = value_of(terms.argument_bytes, sizes)
    through_memory = min(round(arguments), touched) / speeds.bound_memory_bytes_per_s
    memory = (
        arguments
        + max((value_of(point.bytes, sizes) for point in terms.points), default=0.0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    cause: str
    larger: float
    rings: float
    overhead: float
    serial: float
    at_peak: float
    bytes: float

    @property
    def least(self) -> float:
        return self.larger + self.overhead

    @property
    def central(self) -> float:
        return self.least + self.rings


def _kernel(kernel: Kernel, terms: Terms, sizes: dict[str, int], speeds: PlainSpeeds) -> _Kernel:
    count = value_of(kernel.count, sizes)
    streaming = value_of(kernel.bytes, sizes) / speeds.memory_bytes_per_s
    multiplying = at_peak = 0.0
    for one in kernel.matmuls:
        batch, m, n, k = (_at(side, sizes) for side in (one.batch, one.m, one.n, one.k))
        multiplying += float(speeds.matmul_s(one.dtype, batch, m, n, k)[0])
        bound = speeds.bound_flops_per_s(one.dtype)
        at_peak += float((2.0 * batch * m * n * k)[0]) / bound if bound else 0.0
    rings = 0.0
    for one in kernel.windowed:
        ring = math.prod(sizes[axis] for axis in one.axes)
        if terms.platform == "tpu" and ring >= SMALLEST_RING:
            rings += (ring - 1) * value_of(one.bytes, sizes) / speeds.memory_bytes_per_s
    overhead = count * speeds.kernel_overhead_s
    return _Kernel(
        cause="compute" if multiplying >= streaming else "memory",
        larger=count * max(multiplying, streaming),
        rings=count * rings,
        overhead=overhead,
        serial=count * (multiplying + streaming + rings) + overhead,
        at_peak=count * at_peak,
        bytes=count * value_of(kernel.bytes, sizes),
    )


def _at(side: Monomial, sizes: dict[str, int]) -> np.ndarray:
    return np.array([side.at(sizes)])


def _communication(
    terms: Terms, region: int, sizes: dict[str, int]
) -> list[tuple[CollectiveTerm, float, float, float]]:
    """Each collective of one region with its exposed and hidden executions and its slow-down."""
    found = []
    counts: dict[CollectiveTerm, float] = defaultdict(float)
    for term in terms.collectives:  # equal ones, listed twice, are one that is executed more often
        counts[replace(term, count=())] += value_of(term.count, sizes)
    for term, count in counts.items():
        ring = math.prod(sizes[axis] for axis in term.axes)
        if term.region != region or not any(sizes[axis] > 1 for axis in term.axes):
            continue
        windowed = term.windowed and terms.platform == "tpu" and ring >= SMALLEST_RING
        hides = term.hides or windowed
        shown = 0.0 if hides else count
        found.append((term, shown, count - shown, PERMUTE_COST if windowed else 1.0))
    return found


def _collective(
    term: CollectiveTerm, batch: Batch, row: int, axes: tuple[str, ...], speeds: PlainSpeeds
) -> dict[str, float]:
    """Seconds of one execution by cause."""
    sizes = dict(zip(batch.names, batch.sizes[row].tolist()))
    alone = Batch(names=batch.names, ici=batch.ici[row : row + 1], dcn=batch.dcn[row : row + 1])
    payload = np.array([value_of(term.payload_bytes, sizes)])
    seconds = speeds.collective_s(term.kind, payload, simple_routes(alone, axes))
    name = "+".join(axes)
    return {
        "latency": float(seconds.latency_s[0]),
        f"ici {name}": float(seconds.ici_s[0]),
        f"dcn {name}": float(seconds.dcn_s[0]),
    }
