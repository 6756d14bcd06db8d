"""How long the cores take for one instruction of a scheduled program."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from automesh.cost.replay.program import LATENCY, MEMORY_CAUSE, Work, ticks
from automesh.hardware.calibration.engines import engines_of
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.chips import Chip
from automesh.hlo.schedule.nouns import Block, Branch, Compute, Loop, Matmul, Schedule

# Half of a program's multiply-adds stand in operations with at most this many times the cycles that
# they take at best, or its compiler has not tuned its tiles. libtpu 0.0.42.1: an 8192 cube takes
# 1.14 times as many at default effort and 9.4 at low effort; steps of transformers 1.0 to 1.2.
_TUNED = 2.0
# The same for a single operation at the least: rounding is no reason to doubt the compiler.
_SLACK = 0.99
# A TPU's core has a unit for single numbers (loop counters, offsets): its compiler states no cycles
# for them, and they start no kernel. Two operands and a result of eight bytes each, and some more.
_SCALAR_BYTES = 64


class Kernels:
    """Prices the instructions of one program.

    Attributes:
      trust: if the compiler's cycles for matrix products are believed; None if it states none.
    """

    def __init__(self, schedule: Schedule, chip: Chip, speeds: Speeds) -> None:
        engines = engines_of(chip)
        self._speeds = speeds
        self._flops_per_cycle = engines.flops_per_cycle
        self._clock_hz = engines.clock_hz(chip)
        self._onchip_bytes_per_s = engines.onchip * speeds.memory_bytes_per_s
        self._matmul_s: dict[Matmul, float] = {}
        self.trust = self._trusts(schedule)

    def work(self, one: Compute) -> Work:
        """The work of one instruction.

        Cores compute while memory is read and written: the longer of both counts. A matrix product
        takes the cycles that the compiler states, if they are believed, else what
        `Speeds.matmul_s` says. Anything else takes what memory does, and the start of a kernel;
        where the compiler's cycles are fewer, those.
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

    def _streaming(self, one: Compute, memory: float, onchip: float, stated: float) -> Work:
        spent, overhead = max(memory, onchip), self._speeds.kernel_overhead_s
        size = one.hbm_bytes + one.onchip_bytes
        if self._clock_hz and not stated and size <= _SCALAR_BYTES:
            overhead = 0.0
        elif stated and stated < spent + overhead:
            # For memory compilers state too much: an instruction with less is tiny.
            spent, overhead = stated, 0.0
        return _made(one, MEMORY_CAUSE, spent, min(memory, spent), overhead, spent)

    def _excess(self, one: Compute) -> float:
        """Stated cycles over those that the operations take at best; 0 if none are stated."""
        return one.cycles * self._flops_per_cycle / one.flops

    def _trusts(self, schedule: Schedule) -> bool | None:
        found = sorted(
            (self._excess(one), times * one.flops)
            for one, times in _products(schedule.body, 1)
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
            # A kernel states operations and no shape: those of a cube.
            side = max(round((one.flops / 2) ** (1 / 3)), 1)
            cube = Matmul(dtype=one.dtype or "bf16", batch=1, m=side, n=side, k=side)
            return self._product_s(cube) * one.flops / (2 * side**3)
        return sum(self._product_s(product) for product in one.matmuls)

    def _product_s(self, product: Matmul) -> float:
        if product not in self._matmul_s:
            sizes = (product.batch, product.m, product.n, product.k)
            found = self._speeds.matmul_s(product.dtype, *(np.array([float(n)]) for n in sizes))
            self._matmul_s[product] = float(found[0])
        return self._matmul_s[product]


def _products(block: Block, times: int) -> Iterator[tuple[Compute, int]]:
    """The matrix products of a block, and how often each is executed."""
    for one in block.operations:
        if isinstance(one, Compute):
            if one.kind == "matrix" and one.flops:
                yield one, times
        elif isinstance(one, Loop):
            yield from _products(one.body, times * one.trips)
        elif isinstance(one, Branch):
            for inner in one.blocks:
                yield from _products(inner, times)


def _made(
    one: Compute, cause: str, spent: float, memory: float, overhead: float, serial: float
) -> Work:
    causes = ((cause, ticks(spent)), (LATENCY, ticks(overhead)))
    return Work(
        name=one.name,
        causes=tuple(pair for pair in causes if pair[1]),
        memory=ticks(memory),
        serial=ticks(serial) + ticks(overhead),
        flops=one.flops,
        source=one.source,
    )
