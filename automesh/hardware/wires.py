"""Which wires a pattern of communication uses, from the devices that talk (numpy, no jax).

A wire is named for all wires of its kind, since all devices do the same at the same time: `x+` are
the links along the first dimension of a torus in one direction, `x-` those in the other; `chip`
joins the devices of one chip, `nvlink` those of a node, `shared memory` virtual ones; `dcn` is the
network between granules, `host` the way to the host's memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from automesh.hardware.fabric import Fabric, Layouts, Reach, Route, Span
from automesh.hardware.links import reach
from automesh.hardware.placement import Ints, Placement
from automesh.hardware.routes import CORE_LINKS, device_links, routes
from automesh.hardware.walks import (
    Link,
    box_of,
    busiest,
    reach_of_box_or_rings,
    ring_loads,
    way,
)
from automesh.mesh.batch import Batch

DCN, HOST, CHIP = "dcn", "host", "chip"
_DIMENSIONS = "xyz"
_SIGNS = {1: "+", -1: "-"}
_SWITCHES = {"switch": "nvlink", "shared": "shared memory"}
Shares = tuple[tuple[str, float], ...]
Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """What one pattern of communication uses.

    Attributes:
      route: of one mesh, for `Speeds.collective_s`.
      shares: (wire inside a granule, the part of the seconds inside granules that it is busy); the
        largest part is 1.
      apart: for messages between granules beside those inside, which do not wait for each other.
      further_hops: links that the longest message crosses after its first.
    """

    route: Route
    shares: Shares = ()
    apart: Route | None = None
    further_hops: int = 0


class Wiring:
    """The wires of one mesh on one fabric; every pattern is followed once."""

    def __init__(self, placement: Placement, layouts: Layouts) -> None:
        self._placement = placement
        self._fabric = placement.fabric
        self._layouts = layouts
        self._shape = tuple(axis.ici for axis in placement.axes)
        self._known: dict[tuple[object, ...], Wires] = {}

    def of_axes(self, names: tuple[str, ...], *, spreads: bool = False) -> Wires:
        """The wires of the groups along whole mesh axes.

        Args:
          spreads: True for an all-to-all, whose messages load the dimensions of a torus unevenly.
        """
        key = (names, spreads)
        if key not in self._known:
            self._known[key] = self._along(names, spreads)
        return self._known[key]

    def of_groups(self, groups: Groups, *, spreads: bool = False) -> Wires:
        """The wires of groups that are no whole axes: each a box of chips, or else a ring.

        Args:
          groups: numbers of devices in the program.
        """
        key = (groups, spreads)
        if key not in self._known:
            self._known[key] = self._around(groups, spreads)
        return self._known[key]

    def of_pairs(self, pairs: Pairs) -> Wires:
        """The wires that messages from sources to targets really take, all at the same time.

        The most loaded link of each dimension and direction says how long they are busy.
        """
        if pairs not in self._known:
            self._known[pairs] = self._across(pairs)
        return self._known[pairs]

    def _along(self, names: tuple[str, ...], spreads: bool) -> Wires:
        axes = self._placement.axes
        batch = Batch(
            names=tuple(axis.name for axis in axes),
            ici=np.array([[axis.ici for axis in axes]], np.int64),
            dcn=np.array([[axis.dcn for axis in axes]], np.int64),
        )
        route = routes(self._fabric, self._layouts, batch, names)
        columns = [
            column for column, axis in enumerate(axes) if axis.name in names and axis.ici > 1
        ]
        if not columns:
            return Wires(route=route)
        if self._fabric.kind != "torus":
            return Wires(route=route, shares=((_SWITCHES[self._fabric.kind], 1.0),))
        if self._shape in {one.shape for one in self._layouts.crooked}:
            return Wires(route=route, shares=self._ring_shares(self._inner_groups(columns)))
        spans = self._layouts.spans[self._layouts.shapes.index(self._shape)]
        here = [span for column in columns for span in spans[column]]
        return Wires(route=route, shares=_span_shares(here, self._fabric, spreads))

    def _inner_groups(self, columns: Sequence[int]) -> list[Ints]:
        """[devices, 4] each: the groups along some axes inside the first granule."""
        places = self._placement.place[self._placement.granule == 0].reshape(*self._shape, 4)
        last = tuple(range(len(self._shape) - len(columns), len(self._shape)))
        size = math.prod(self._shape[column] for column in columns)
        return list(np.moveaxis(places, tuple(columns), last).reshape(-1, size, 4))

    def _around(self, groups: Groups, spreads: bool) -> Wires:
        inner: list[Ints] = []
        granules = 1
        for group in groups:
            members = np.array(group, np.int64)
            where = self._placement.granule[members]
            found = np.unique(where)
            granules = max(granules, len(found))
            inner += [self._placement.place[members[where == one]] for one in found]
        fabric, size = self._fabric, max(len(one) for one in inner)
        if size == 1:
            return Wires(route=_route(fabric, granules=granules))
        if fabric.kind != "torus":
            route = _route(
                fabric,
                size=size,
                granules=granules,
                speed=fabric.chip.link_bytes_per_s,
                hops=size - 1,
            )
            return Wires(route=route, shares=((_SWITCHES[fabric.kind], 1.0),))
        box = _common_box(inner)
        if box is None:
            found = reach_of_box_or_rings(inner, fabric.torus, fabric.wraps)
            shares, part = self._ring_shares(inner), 1.0
        else:
            found = reach(box, fabric.torus, fabric.wraps)
            shares = _span_shares(box, fabric, spreads)
            part = size / found.chips / fabric.devices_per_chip
        return Wires(route=_reached(fabric, found, size, granules, part), shares=shares)

    def _ring_shares(self, groups: Sequence[Ints]) -> Shares:
        loads = busiest(ring_loads(groups, self._fabric))
        return _shares(loads) if loads else ((CHIP, 1.0),)

    def _across(self, pairs: Pairs) -> Wires:
        place, granule, fabric = self._placement.place, self._placement.granule, self._fabric
        loads: Counter[Link] = Counter()
        leaving: Counter[int] = Counter()  # Messages of a device to its own granule, ...
        crossing: Counter[int] = Counter()  # ... and to others.
        longest = 0
        for source, target in pairs:
            if source == target:
                continue
            if granule[source] != granule[target]:
                crossing[source] += 1
                continue
            leaving[source] += 1
            if fabric.kind == "torus":
                here, there = _chip(place[source]), _chip(place[target])
                onward = way(here, there, fabric.torus, fabric.wraps)
                longest = max(longest, len(onward))
                # A link belongs to its granule.
                whose = int(granule[source])
                loads.update(((whose, *at), along, sign) for at, along, sign in onward)
        apart = None
        if crossing:
            apart = _route(fabric, granules=2, load=max(crossing.values()))
        if not leaving:
            return Wires(route=apart or _route(fabric), apart=None)
        inside, shares = self._inside(loads, max(leaving.values()))
        return Wires(route=inside, shares=shares, apart=apart, further_hops=max(longest - 1, 0))

    def _inside(self, loads: Counter[Link], messages: int) -> tuple[Route, Shares]:
        """The route of messages inside granules, and the wires that they load."""
        fabric = self._fabric
        if fabric.kind != "torus":
            speed = fabric.chip.link_bytes_per_s / messages
            return _route(fabric, size=2, speed=speed), ((_SWITCHES[fabric.kind], 1.0),)
        link = fabric.chip.link_bytes_per_s * fabric.devices_per_chip
        if not loads:  # From one device of a chip to another.
            return _route(fabric, size=2, speed=CORE_LINKS * link / messages), ((CHIP, 1.0),)
        most = max(loads.values())
        return _route(fabric, size=2, speed=link / most), _shares(busiest(loads))


def _chip(place: Ints) -> tuple[int, ...]:
    return tuple(int(at) for at in place[:3])


def _route(
    fabric: Fabric,
    *,
    size: int = 1,
    granules: int = 1,
    speed: float = math.inf,
    hops: float = 1.0,
    load: int = 1,
) -> Route:
    """A route of one mesh; `load` messages of a device share its part of the network."""
    return Route(
        ici_size=np.array([float(size)]),
        dcn_size=np.array([float(granules)]),
        ici_bytes_per_s=np.array([speed]),
        ici_hops=np.array([hops if size > 1 else 0.0]),
        dcn_bytes_per_s=np.array([fabric.chip.dcn_bytes_per_s / load]),
    )


def _reached(fabric: Fabric, found: Reach, size: int, granules: int, part: float) -> Route:
    speed, hops, transit, step = device_links(fabric, found, size, part)
    return Route(
        ici_size=np.array([float(size)]),
        dcn_size=np.array([float(granules)]),
        ici_bytes_per_s=np.array([speed]),
        ici_hops=np.array([hops]),
        dcn_bytes_per_s=np.array([fabric.chip.dcn_bytes_per_s]),
        ici_transit=np.array([transit]),
        ici_step_share=np.array([step]),
    )


def _common_box(groups: Sequence[Ints]) -> tuple[Span, ...] | None:
    """The box that every group is, moved about; None if they are none, or differ."""
    corners = {
        tuple(sorted(tuple(int(at) for at in place) for place in group - group.min(axis=0)))
        for group in groups
    }
    return box_of(groups[0]) if len(corners) == 1 else None


def _span_shares(spans: Sequence[Span], fabric: Fabric, spreads: bool) -> Shares:
    """Dimensions serve at the same time and equally long, but for an all-to-all.

    An all-to-all loads the middle of every dimension with a quarter of what its members hold, see
    `automesh.hardware.links.reach`.
    """
    weights: dict[int, float] = {}
    for dimension, size in enumerate(fabric.torus):
        here = [span for span in spans if span.dimension == dimension and span.extent > 1]
        if here:
            block = max(span.extent * span.stride for span in here)
            weights[dimension] = block / (2 if fabric.wraps[dimension] and block == size else 1)
    most = max(weights.values(), default=1.0)
    found: list[tuple[str, float]] = []
    for dimension, weight in weights.items():
        share = weight / most if spreads else 1.0
        found += [(_DIMENSIONS[dimension] + sign, share) for sign in _SIGNS.values()]
    if any(span.dimension < 0 for span in spans):
        found.append((CHIP, 1.0))
    return tuple(found)


def _shares(loads: Mapping[tuple[int, int], int]) -> Shares:
    most = max(loads.values())
    return tuple(
        (_DIMENSIONS[dimension] + _SIGNS[direction], load / most)
        for (dimension, direction), load in sorted(loads.items(), reverse=True)
    )
