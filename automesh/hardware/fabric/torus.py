"""What the links of a torus give a group that lies along some of its dimensions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from automesh.hardware.fabric.fabric import Fabric, Reach, Span

# From chip to chip of a torus, link by link.

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


_ENOUGH = 4
_BETWEEN = 2


@cache
def reach(spans: tuple[Span, ...], torus: tuple[int, ...], wraps: tuple[bool, ...]) -> Reach:
    """What the links give the groups along all of `spans`.

    Along one dimension groups whose members are not neighbours lie between each other and share its
    links. A group that runs once round a dimension whose ends are linked sends both ways; any other
    is a line, whose shards all cross its middle one way (scaling-book, "Sharded matrices": half the
    speed). Dimensions serve at the same time, each a part of the array. An all-to-all is held up by
    the dimension whose middle the most bytes cross: a quarter of a line's array.
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
        groups = block / members  # That share each link.
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
    spans: tuple[Span, ...], torus: tuple[int, ...], wraps: tuple[bool, ...]
) -> dict[int, int]:
    """Messages over the busiest link of each dimension, if one group passes some on both ways."""
    found: dict[int, int] = {}
    small = shrunk(spans, torus, wraps)
    ring = ring_along(small.spans, len(torus))
    for (_, dimension, _), load in both_ways(ring, small.torus, wraps).items():
        found[dimension] = max(found.get(dimension, 1), load)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """Spans whose ring loads the links of each dimension as that of longer ones does."""

    spans: tuple[Span, ...]
    torus: tuple[int, ...]


def shrunk(spans: tuple[Span, ...], torus: tuple[int, ...], wraps: tuple[bool, ...]) -> Shrunk:
    """The shortest spans that are as good as these to follow a ring along.

    Along a dimension the fourth chip adds nothing: one step forward, one step over the end, one way
    back. The same holds for what lies between two chips of a ring.
    """
    sizes = list(torus)
    cut: dict[Span, Span] = {}
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
            return Shrunk(spans=spans, torus=torus)  # Some ways back are round the torus.
        # If it does not close, the way back is over the links of the way there.
        sizes[dimension] = now if wraps[dimension] and was == size else 2 * now
    return Shrunk(spans=tuple(cut.get(span, span) for span in spans), torus=tuple(sizes))


# Groups of chips followed link by link, where they are no product of mesh axes (numpy, no jax).

Ints = NDArray[np.int64]
CORE = 3  # Place of the core on its chip among the coordinates x, y, z, core.


def box_of(points: Ints) -> tuple[Span, ...] | None:
    """The spans whose product the points are, in any order; None if there are none.

    Args:
      points: [points, 4]: x, y, z and core, all distinct.
    """
    spans: list[Span] = []
    for dimension in range(4):
        along = np.unique(points[:, dimension])
        if len(along) == 1:
            continue
        strides = np.unique(np.diff(along))
        if len(strides) > 1:
            return None
        physical = -1 if dimension == CORE else dimension
        stride = 1 if dimension == CORE else int(strides[0])
        spans.append(Span(dimension=physical, extent=len(along), stride=stride))
    if math.prod(span.extent for span in spans) != len(points):
        return None
    return tuple(spans)


def reach_of_box_or_rings(
    groups: Sequence[Ints], torus: tuple[int, ...], wraps: tuple[bool, ...]
) -> Reach:
    """What links give the groups: as a box if one group is the whole slice, else as rings.

    Args:
      groups: [devices, 4] each, in the order of the mesh.
    """
    box = box_of(groups[0]) if len(groups) == 1 else None
    return reach_of_rings(groups, torus, wraps) if box is None else reach(box, torus, wraps)


def reach_of_rings(
    groups: Sequence[Ints], torus: tuple[int, ...], wraps: tuple[bool, ...]
) -> Reach:
    """Every group talks along a ring through its chips, all groups at the same time.

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
    """Messages over each link when every group passes one on, both ways round its ring."""
    loads: Counter[Link] = Counter()
    for group in groups:
        loads += both_ways(chips_of(group), fabric.torus, fabric.wraps)
    return loads


def busiest(loads: Counter[Link]) -> dict[tuple[int, int], int]:
    """(dimension, direction) -> messages over its most loaded link."""
    found: dict[tuple[int, int], int] = {}
    for (_, dimension, direction), load in loads.items():
        found[dimension, direction] = max(found.get((dimension, direction), 0), load)
    return found


def chips_of(group: Iterable[Ints]) -> list[Point]:
    """The chips of some devices, each once, in order."""
    return list(dict.fromkeys(tuple(int(at) for at in place[:CORE]) for place in group))
