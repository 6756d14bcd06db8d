"""How much memory a step needs: which buffers live together at every point of it.

The program is walked in the order of its trace, and once more with every operation as late as
possible: compilers choose something between the two. A buffer lives from the operation that fills
it to the last one that reads it; see `memory.walk`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from automesh.cost.terms import MemoryPoint, Monomial, Sum, value_of
from automesh.ir.graph import Graph, Value, total_bytes
from automesh.ir.memory.cpu import CpuCompiler
from automesh.ir.memory.order import Compiler
from automesh.ir.memory.walk import walk

# Which points of a program can be the peak on some mesh.

Powers = tuple[tuple[str, int], ...]


def undominated(points: Sequence[MemoryPoint]) -> tuple[MemoryPoint, ...]:
    """Leaves out every point that another one reaches on every mesh, whatever its sizes."""
    distinct = {point.bytes: point for point in points if point.bytes}
    axes = {axis for total in distinct for one in total for axis, _ in one.powers}
    small = dict.fromkeys(axes, 2)
    kept: list[MemoryPoint] = []
    # Who reaches another everywhere does so on the mesh of twos as well.
    for point in sorted(distinct.values(), key=lambda p: -value_of(p.bytes, small)):
        if not any(_reaches(one.bytes, point.bytes) for one in kept):
            kept.append(point)
    return tuple(kept)


def _reaches(larger: Sum, smaller: Sum) -> bool:
    """True only if `larger` is at least `smaller` for all sizes from 1 on.

    Every term of `smaller` is covered by terms of `larger` that grow at least as fast with every
    axis; those that fit most closely first.
    """
    left = {one.powers: one.coefficient for one in larger}
    rest: list[tuple[Powers, float]] = []
    for one in smaller:
        missing = one.coefficient - left.get(one.powers, 0.0)
        left[one.powers] = max(0.0, -missing)
        if missing > 0:
            rest.append((one.powers, missing))
    for powers, missing in rest:
        above = sorted((p for p in left if _grows_faster(p, powers)), key=lambda p: _total(p))
        for one in above:
            used = min(missing, left[one])
            left[one] -= used
            missing -= used
        # Sums of the same floats in another order differ in the last digits.
        if missing > 0.5:
            return False
    return True


def _grows_faster(one: Powers, other: Powers) -> bool:
    first, second = dict(one), dict(other)
    return all(first.get(a, 0) >= second.get(a, 0) for a in first.keys() | second.keys())


def _total(powers: Powers) -> int:
    return sum(power for _, power in powers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a step keeps in the memory of one device.

    Attributes:
      points: temporaries alone, at the points of the program that can be the peak.
      argument_bytes, output_bytes: all of them, whether they share memory or not; without those in
        host memory.
      alias_bytes: of the outputs that take over the memory of arguments.
    """

    points: tuple[MemoryPoint, ...]
    argument_bytes: Sum
    output_bytes: Sum
    alias_bytes: Sum


def memory_points(graph: Graph, *, stored: Collection[Value], platform: str) -> Footprint:
    """What the program keeps in memory at each of its points.

    Args:
      graph: after the rewrites of the platform's compiler.
      stored: values that get a buffer of their own; all others are computed where they are read.
      platform: cpu, gpu, tpu or none.
    """
    takeovers = _takeovers(graph)
    compiler = CpuCompiler(stored) if platform == "cpu" else Compiler(stored)
    points: list[MemoryPoint] = []
    for order in compiler.orders:
        points.extend(walk(graph.top, takeovers, compiler, order))
    on_device = [a for n, a in enumerate(graph.top.arguments) if n not in graph.host]
    return Footprint(
        points=tuple(_packed(point, compiler.packing) for point in undominated(points)),
        argument_bytes=total_bytes(on_device),
        output_bytes=total_bytes(
            [value for n, value in enumerate(graph.top.returned) if n not in graph.host_outputs]
        ),
        alias_bytes=total_bytes([graph.top.returned[output] for output in takeovers]),
    )


def _packed(point: MemoryPoint, packing: float) -> MemoryPoint:
    total = tuple(
        Monomial(coefficient=packing * one.coefficient, powers=one.powers) for one in point.bytes
    )
    return MemoryPoint(bytes=total, source=point.source)


def _takeovers(graph: Graph) -> dict[int, int]:
    """Output -> the argument whose memory it takes over.

    A donated argument goes to the first output of its shape, type and sharding, as jax pairs them.
    """
    pairs = {output: argument for argument, output in graph.aliased}
    taken = set(pairs.values())
    free: dict[tuple[object, ...], list[int]] = {}
    for position in graph.donated:
        if position not in taken and position not in graph.host:
            free.setdefault(_kind(graph.top.arguments[position]), []).append(position)
    for position, value in enumerate(graph.top.returned):
        if position in graph.host_outputs:
            continue
        if position not in pairs and (waiting := free.get(_kind(value))):
            pairs[position] = waiting.pop(0)
    return pairs


def _kind(value: Value) -> tuple[object, ...]:
    return (value.shape, value.dtype, value.axes)
