"""Groups of chips followed link by link, where they are no product of mesh axes (numpy, no jax)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from automesh.hardware.fabric.fabric import Fabric, Reach, Span
from automesh.hardware.fabric.torus_links import reach
from automesh.hardware.fabric.torus_paths import Link, Point, both_ways, way

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
