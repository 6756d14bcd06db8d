"""From chip to chip of a torus, link by link."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from automesh.hardware.fabric.fabric import Span

Point = tuple[int, ...]
# (chip that it leaves, dimension, direction: 1 or -1)
Link = tuple[Point, int, int]


def way(here: Point, there: Point, torus: tuple[int, ...], wraps: tuple[bool, ...]) -> list[Link]:
    """The links from one chip to another: along x first, then y, then z, the short way round.

    >>> way((0, 0), (3, 1), (4, 4), (True, False))
    [((0, 0), 0, -1), ((3, 0), 1, 1)]
    """
    at = list(here)
    found: list[Link] = []
    for dimension, size in enumerate(torus):
        distance = there[dimension] - at[dimension]
        if wraps[dimension] and abs(distance) > size / 2:
            distance -= int(math.copysign(size, distance))
        direction = 1 if distance > 0 else -1
        for _ in range(abs(distance)):
            found.append((tuple(at), dimension, direction))
            at[dimension] = (at[dimension] + direction) % size
    return found


def both_ways(
    ring: Sequence[Point], torus: tuple[int, ...], wraps: tuple[bool, ...]
) -> Counter[Link]:
    """Messages over each link when every chip of a ring sends to the next and to the last one."""
    loads: Counter[Link] = Counter()
    for here, there in zip(ring, [*ring[1:], *ring[:1]], strict=True):
        loads.update(way(here, there, torus, wraps))
        loads.update(way(there, here, torus, wraps))
    return loads


def ring_along(spans: Sequence[Span], dimensions: int) -> list[Point]:
    """The chips along some spans, one span after the other, the last one innermost.

    >>> ring_along([Span(dimension=1, extent=2, stride=3)], 2)
    [(0, 0), (0, 3)]
    """
    ring: list[Point] = [(0,) * dimensions]
    for span in spans:
        if span.dimension >= 0:
            ring = [
                (*at[: span.dimension], at[span.dimension] + step, *at[span.dimension + 1 :])
                for at in ring
                for step in range(0, span.extent * span.stride, span.stride)
            ]
    return ring
