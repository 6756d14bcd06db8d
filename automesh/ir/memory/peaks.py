"""Which points of a program can be the peak on some mesh."""

from __future__ import annotations

from collections.abc import Sequence

from automesh.cost.terms import MemoryPoint, Sum, value_of

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
