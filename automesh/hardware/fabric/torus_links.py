"""What the links of a torus give a group that lies along some of its dimensions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from automesh.hardware.fabric.fabric import Reach, Span
from automesh.hardware.fabric.torus_paths import both_ways, ring_along

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
