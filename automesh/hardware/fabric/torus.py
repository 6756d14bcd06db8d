"""Computes the link capacity of a group that extends along some dimensions of a torus."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from automesh.hardware.fabric.fabric import AxisSpan, Fabric, Reach

# From chip to chip of a torus, link by link.

Point = tuple[int, ...]
# (chip that it leaves, dimension, direction: 1 or -1)
Link = tuple[Point, int, int]


def way(here: Point, there: Point, torus: tuple[int, ...], wraps: tuple[bool, ...]) -> list[Link]:
    """Lists the links from one chip to another: along x, then y, then z, the short way round.

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
    """Counts messages per link when every chip of a ring sends to the next and the previous one."""
    loads: Counter[Link] = Counter()
    for here, there in zip(ring, [*ring[1:], *ring[:1]], strict=True):
        loads.update(way(here, there, torus, wraps))
        loads.update(way(there, here, torus, wraps))
    return loads


def ring_along(spans: Sequence[AxisSpan], dimensions: int) -> list[Point]:
    """Lists the chips along some spans, one span after the other, the last one innermost.

    >>> ring_along([AxisSpan(dimension=1, extent=2, stride=3)], 2)
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


_ENOUGH = 4
_BETWEEN = 2


@cache
def reach(spans: tuple[AxisSpan, ...], torus: tuple[int, ...], wraps: tuple[bool, ...]) -> Reach:
    """Computes the link capacity of the groups along all of `spans`.

    Along one dimension, groups whose members are not neighbours are interleaved and share its
    links. A group that runs once round a dimension whose ends are linked sends both ways; any other
    is a line, whose shards all cross its middle one way (scaling-book, "Sharded matrices": half the
    speed). Dimensions work at the same time, each on a part of the array. The bottleneck of an
    all-to-all is the dimension whose middle the most bytes cross: a quarter of a line's array.
    """
    chips = math.prod(span.extent for span in spans if span.dimension >= 0)
    links, step, hops, slowest = 0.0, math.inf, 0.0, 0.0
    busiest = _busiest(spans, torus, wraps)
    pair = math.inf
    for dimension, size in enumerate(torus):
        here = [span for span in spans if span.dimension == dimension and span.extent > 1]
        if not here:
            continue
        members = math.prod(span.extent for span in here)
        block = max(span.extent * span.stride for span in here)
        closed = wraps[dimension] and block == size
        groups = block / members  # Groups that share each link.
        both = 2 if closed else 1
        links += both / groups
        step = min(step, 1 / groups)
        pair = min(pair, 1 / groups / busiest[dimension])
        hops += size / 2 if closed else sum((one.extent - 1) * one.stride for one in here)
        slowest = max(slowest, members * groups / both)
    return Reach(
        chips=chips,
        links=links,
        step_links=step if links else 0.0,
        pair_links=pair if links else 0.0,
        hops=hops,
        spread=slowest / (4 * chips),
    )


def _busiest(
    spans: tuple[AxisSpan, ...], torus: tuple[int, ...], wraps: tuple[bool, ...]
) -> dict[int, int]:
    """Counts messages over the busiest link of each dimension, if one group sends both ways."""
    found: dict[int, int] = {}
    small = shrunk(spans, torus, wraps)
    ring = ring_along(small.spans, len(torus))
    for (_, dimension, _), load in both_ways(ring, small.torus, wraps).items():
        found[dimension] = max(found.get(dimension, 1), load)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """Shortened spans whose ring loads the links of each dimension as the long ones do."""

    spans: tuple[AxisSpan, ...]
    torus: tuple[int, ...]


def shrunk(spans: tuple[AxisSpan, ...], torus: tuple[int, ...], wraps: tuple[bool, ...]) -> Shrunk:
    """Shortens spans without changing how their ring loads the links.

    Three chips along a dimension show everything: one step forward, one step over the end, one way
    back. The same holds for the chips between two neighbours of a ring.
    """
    sizes = list(torus)
    cut: dict[AxisSpan, AxisSpan] = {}
    for dimension, size in enumerate(torus):
        inner_first = sorted(
            (span for span in spans if span.dimension == dimension), key=lambda span: span.stride
        )
        was = now = 1
        for span in inner_first:
            now *= min(span.stride // was, _BETWEEN)
            cut[span] = replace(span, extent=min(span.extent, _ENOUGH), stride=now)
            was, now = span.stride * span.extent, now * cut[span].extent
        if wraps[dimension] and was > size / 2 and was != size:
            return Shrunk(spans=spans, torus=torus)  # Back round the torus.
        sizes[dimension] = now if wraps[dimension] and was == size else 2 * now
    return Shrunk(spans=tuple(cut.get(span, span) for span in spans), torus=tuple(sizes))


# Groups of chips that are no product of mesh axes, traced link by link (numpy, no jax).

Ints = NDArray[np.int64]
CORE = 3  # Index of the core among the coordinates x, y, z, core.


def box_of(points: Ints) -> tuple[AxisSpan, ...] | None:
    """Finds the spans whose product is the set of points; None if there are none.

    Args:
      points: [points, 4]: x, y, z and core, all distinct.
    """
    spans: list[AxisSpan] = []
    for dimension in range(4):
        along = np.unique(points[:, dimension])
        if len(along) == 1:
            continue
        strides = np.unique(np.diff(along))
        if len(strides) > 1:
            return None
        physical = -1 if dimension == CORE else dimension
        stride = 1 if dimension == CORE else int(strides[0])
        spans.append(AxisSpan(dimension=physical, extent=len(along), stride=stride))
    if math.prod(span.extent for span in spans) != len(points):
        return None
    return tuple(spans)


def reach_of_box_or_rings(
    groups: Sequence[Ints], torus: tuple[int, ...], wraps: tuple[bool, ...]
) -> Reach:
    """Computes the groups' link capacity: as a box if one group is the whole slice, else as rings.

    Args:
      groups: [devices, 4] each, in the order of the mesh.
    """
    box = box_of(groups[0]) if len(groups) == 1 else None
    return reach_of_rings(groups, torus, wraps) if box is None else reach(box, torus, wraps)


def reach_of_rings(
    groups: Sequence[Ints], torus: tuple[int, ...], wraps: tuple[bool, ...]
) -> Reach:
    """Computes the capacity if every group uses a ring through its chips, all at the same time.

    Args:
      groups: [devices, 4] each, in the order of the ring.
    """
    loads: Counter[Link] = Counter()
    pairs: Counter[Link] = Counter()
    steps: Counter[Link] = Counter()
    chips = hops = 0
    for group in groups:
        ring = chips_of(group)
        chips = max(chips, len(ring))
        length = 0
        for here, there in zip(ring, ring[1:] + ring[:1], strict=True):
            onward = way(here, there, torus, wraps)
            length += len(onward)
            steps.update(onward)
            loads.update(onward)
            loads.update(way(there, here, torus, wraps))
        hops = max(hops, length)
        for here, there in itertools.permutations(ring, 2):
            pairs.update(way(here, there, torus, wraps))
    if chips == 1:
        return Reach(chips=1, links=0.0, step_links=0.0, pair_links=0.0, hops=0.0, spread=0.0)
    return Reach(
        chips=chips,
        links=2 / max(loads.values()),
        step_links=1 / max(steps.values()),
        pair_links=1 / max(loads.values()),
        hops=hops / 2,
        spread=max(pairs.values()) / chips**2,
    )


def ring_loads(groups: Sequence[Ints], fabric: Fabric) -> Counter[Link]:
    """Counts messages per link when every group sends both ways round its ring."""
    loads: Counter[Link] = Counter()
    for group in groups:
        loads += both_ways(chips_of(group), fabric.torus, fabric.wraps)
    return loads


def busiest(loads: Counter[Link]) -> dict[tuple[int, int], int]:
    """Returns messages over the most loaded link, by (dimension, direction)."""
    found: dict[tuple[int, int], int] = {}
    for (_, dimension, direction), load in loads.items():
        found[dimension, direction] = max(found.get((dimension, direction), 0), load)
    return found


def chips_of(group: Iterable[Ints]) -> list[Point]:
    """Lists the chips of some devices, each once, in order."""
    return list(dict.fromkeys(tuple(int(at) for at in place[:CORE]) for place in group))
