"""Finds the wires that a communication pattern uses, from the devices that send (numpy, no jax).

One name stands for all wires of a kind, since all devices do the same at the same time: `x+` are
the links along the first dimension of a torus in one direction, `x-` those in the other. Where
messages between pairs use only some of these, as the two directions of a ring that winds through a
torus do, the links that serve the same patterns form a strand: `x+ 1`, `x+ 2`. `chip` joins the
devices of one chip, `nvlink` those of a node, `shared memory` virtual ones; `dcn` is the network
between granules, `host` the way to the host's memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from automesh.hardware.fabric.fabric import AxisSpan, Fabric, Layouts, Reach, Route
from automesh.hardware.fabric.placement import Ints, Placement
from automesh.hardware.fabric.routes import CORE_LINKS, device_links, routes
from automesh.hardware.fabric.torus import (
    Link,
    box_of,
    busiest,
    reach,
    reach_of_box_or_rings,
    ring_loads,
    way,
)
from automesh.mesh.axes import Plan
from automesh.mesh.plan_arrays import batch_of

DCN, HOST, CHIP = "dcn", "host", "chip"
_DIMENSIONS = "xyz"
_SIGNS = {1: "+", -1: "-"}
_SWITCHES = {"switch": "nvlink", "shared": "shared memory"}
Shares = tuple[tuple[str, float], ...]
Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """The wires that one communication pattern uses.

    Attributes:
      route: of one mesh, for `Speeds.collective_s`.
      shares: (wire inside a granule, the part of the seconds inside granules that it is busy); the
        largest part is 1.
      apart: True if messages between granules and inside them do not wait for each other.
      further_hops: links that the longest message crosses after its first.
    """

    route: Route
    shares: Shares = ()
    apart: Route | None = None
    further_hops: int = 0


class LinkMap:
    """The wires of one mesh on one fabric; every pattern is traced once.

    Args:
      patterns: patterns of messages between pairs that are traced link by link; any others use all
        links of each dimension and direction that they need.
    """

    def __init__(
        self, placement: Placement, layouts: Layouts, patterns: Sequence[Pairs] = ()
    ) -> None:
        self._placement = placement
        self._fabric = placement.fabric
        self._layouts = layouts
        self._shape = tuple(axis.ici for axis in placement.axes)
        self._known: dict[tuple[object, ...], LinkUse] = {}
        self._strands = _Strands([self._messages(pairs).loads for pairs in patterns])

    def of_axes(self, names: tuple[str, ...], *, spreads: bool = False) -> LinkUse:
        """Returns the wires of the groups along whole mesh axes.

        Args:
          spreads: True for an all-to-all, whose messages load the dimensions of a torus unevenly.
        """
        key = (names, spreads)
        if key not in self._known:
            self._known[key] = self._strands.all_of(self._along(names, spreads))
        return self._known[key]

    def of_groups(self, groups: Groups, *, spreads: bool = False) -> LinkUse:
        """Returns the wires of groups that are no whole axes: each a box of chips, or else a ring.

        Args:
          groups: numbers of devices in the program.
        """
        key = (groups, spreads)
        if key not in self._known:
            self._known[key] = self._strands.all_of(self._around(groups, spreads))
        return self._known[key]

    def of_pairs(self, pairs: Pairs) -> LinkUse:
        """Returns the wires of messages from sources to targets, all sent at the same time.

        The most loaded link of each dimension and direction says how long they are busy.
        """
        if pairs not in self._known:
            self._known[pairs] = self._across(pairs)
        return self._known[pairs]

    def _along(self, names: tuple[str, ...], spreads: bool) -> LinkUse:
        axes = self._placement.axes
        route = routes(self._fabric, self._layouts, batch_of([Plan(axes=axes)]), names)
        columns = [
            column for column, axis in enumerate(axes) if axis.name in names and axis.ici > 1
        ]
        if not columns:
            return LinkUse(route=route)
        if self._fabric.kind != "torus":
            return LinkUse(route=route, shares=((_SWITCHES[self._fabric.kind], 1.0),))
        if self._shape in {one.shape for one in self._layouts.crooked}:
            return LinkUse(route=route, shares=self._ring_shares(self._inner_groups(columns)))
        spans = self._layouts.spans[self._layouts.shapes.index(self._shape)]
        here = [span for column in columns for span in spans[column]]
        return LinkUse(route=route, shares=_span_shares(here, self._fabric, spreads))

    def _inner_groups(self, columns: Sequence[int]) -> list[Ints]:
        """Returns the groups along some axes inside the first granule, [devices, 4] each."""
        places = self._placement.place[self._placement.granule == 0].reshape(*self._shape, 4)
        last = tuple(range(len(self._shape) - len(columns), len(self._shape)))
        size = math.prod(self._shape[column] for column in columns)
        return list(np.moveaxis(places, tuple(columns), last).reshape(-1, size, 4))

    def _around(self, groups: Groups, spreads: bool) -> LinkUse:
        parts: dict[int, list[Ints]] = {}
        granules = 1
        for group in groups:
            members = np.array(group, np.int64)
            where = self._placement.granule[members]
            found = np.unique(where)
            granules = max(granules, len(found))
            for one in found:
                parts.setdefault(int(one), []).append(self._placement.place[members[where == one]])
        inner = [part for held in parts.values() for part in held]
        fabric, size = self._fabric, max(len(one) for one in inner)
        if size == 1:
            return LinkUse(route=_route(fabric, granules=granules))
        if fabric.kind != "torus":
            route = _route(
                fabric,
                size=size,
                granules=granules,
                speed=fabric.chip.link_bytes_per_s,
                hops=size - 1,
            )
            return LinkUse(route=route, shares=((_SWITCHES[fabric.kind], 1.0),))
        box = _common_box(inner)
        if box is None:
            found, slowest = _slowest(list(parts.values()), fabric)
            shares, part = self._ring_shares(slowest), 1.0
        else:
            found = reach(box, fabric.torus, fabric.wraps)
            shares = _span_shares(box, fabric, spreads)
            part = size / found.chips / fabric.devices_per_chip
        return LinkUse(route=_reached(fabric, found, size, granules, part), shares=shares)

    def _ring_shares(self, groups: Sequence[Ints]) -> Shares:
        loads = busiest(ring_loads(groups, self._fabric))
        return _shares(loads) if loads else ((CHIP, 1.0),)

    def _across(self, pairs: Pairs) -> LinkUse:
        found = self._messages(pairs)
        apart = None
        if found.crossing:
            apart = _route(self._fabric, granules=2, load=max(found.crossing.values()))
        if not found.leaving:
            return LinkUse(route=apart or _route(self._fabric), apart=None)
        inside, shares = self._inside(found.loads, max(found.leaving.values()))
        return LinkUse(
            route=inside, shares=shares, apart=apart, further_hops=max(found.longest - 1, 0)
        )

    def _messages(self, pairs: Pairs) -> _Messages:
        place, granule, fabric = self._placement.place, self._placement.granule, self._fabric
        found = _Messages()
        for source, target in pairs:
            if source == target:
                continue
            if granule[source] != granule[target]:
                found.crossing[source] += 1
                continue
            found.leaving[source] += 1
            if fabric.kind == "torus":
                here, there = _chip(place[source]), _chip(place[target])
                onward = way(here, there, fabric.torus, fabric.wraps)
                found.longest = max(found.longest, len(onward))
                # A link belongs to its granule.
                whose = int(granule[source])
                found.loads.update(((whose, *at), along, sign) for at, along, sign in onward)
        return found

    def _inside(self, loads: Counter[Link], messages: int) -> tuple[Route, Shares]:
        """Returns the route of messages inside granules, and the wires that they load."""
        fabric = self._fabric
        if fabric.kind != "torus":
            speed = fabric.chip.link_bytes_per_s / messages
            return _route(fabric, size=2, speed=speed), ((_SWITCHES[fabric.kind], 1.0),)
        link = fabric.chip.link_bytes_per_s * fabric.devices_per_chip
        if not loads:  # From one device of a chip to another.
            return _route(fabric, size=2, speed=CORE_LINKS * link / messages), ((CHIP, 1.0),)
        most = max(loads.values())
        return _route(fabric, size=2, speed=link / most), self._strands.of(loads)


@dataclass(slots=True, kw_only=True)
class _Messages:
    """The links that the messages of a pattern cross.

    Attributes:
      loads: messages over each link.
      leaving: messages of each device to its own granule.
      crossing: messages of each device to other granules.
      longest: links that the farthest message crosses.
    """

    loads: Counter[Link] = field(default_factory=Counter[Link])
    leaving: Counter[int] = field(default_factory=Counter[int])
    crossing: Counter[int] = field(default_factory=Counter[int])
    longest: int = 0


class _Strands:
    """Links of one dimension and direction, grouped by the patterns that use them.

    Args:
      patterns: messages over each link, of each pattern.
    """

    def __init__(self, patterns: Sequence[Counter[Link]]) -> None:
        users: dict[Link, list[int]] = {}
        for number, loads in enumerate(patterns):
            for link in loads:
                users.setdefault(link, []).append(number)
        kinds: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        for (_, dimension, sign), numbers in users.items():
            kinds.setdefault((dimension, sign), set()).add(tuple(numbers))
        names: dict[tuple[int, int, tuple[int, ...]], str] = {}
        self._within: dict[str, tuple[str, ...]] = {}
        for (dimension, sign), found in kinds.items():
            whole = _DIMENSIONS[dimension] + _SIGNS[sign]
            for place, numbers in enumerate(sorted(found), start=1):
                names[dimension, sign, numbers] = f"{whole} {place}" if len(found) > 1 else whole
            self._within[whole] = tuple(names[dimension, sign, one] for one in sorted(found))
        self._name = {
            link: names[link[1], link[2], tuple(numbers)] for link, numbers in users.items()
        }

    def of(self, loads: Counter[Link]) -> Shares:
        """Returns the strands of a pattern; all of a direction if one of its links is unknown."""
        if any(link not in self._name for link in loads):
            return self._all(_shares(busiest(loads)))
        found: dict[str, int] = {}
        for link, load in loads.items():
            found[self._name[link]] = max(found.get(self._name[link], 0), load)
        most = max(found.values())
        return tuple((name, load / most) for name, load in sorted(found.items()))

    def all_of(self, wires: LinkUse) -> LinkUse:
        """Replaces wires by all of their strands."""
        return replace(wires, shares=self._all(wires.shares))

    def _all(self, shares: Shares) -> Shares:
        return tuple(
            (strand, share) for name, share in shares for strand in self._within.get(name, (name,))
        )


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
    """Makes the route of one mesh, for a device whose `load` messages share its part of the
    network."""
    return Route(
        ici_size=np.array([float(size)]),
        dcn_size=np.array([float(granules)]),
        ici_bytes_per_s=np.array([speed]),
        ici_hops=np.array([hops if size > 1 else 0.0]),
        dcn_bytes_per_s=np.array([fabric.chip.dcn_bytes_per_s / load]),
    )


def _reached(fabric: Fabric, found: Reach, size: int, granules: int, part: float) -> Route:
    speed, hops, transit, step, pair = device_links(fabric, found, size, part)
    return replace(
        _route(fabric, size=size, granules=granules, speed=speed, hops=hops),
        ici_transit=np.array([transit]),
        ici_step_share=np.array([step]),
        ici_pair_share=np.array([pair]),
    )


def _common_box(groups: Sequence[Ints]) -> tuple[AxisSpan, ...] | None:
    """Returns the box whose shape every group has; None if they are no boxes, or differ."""
    corners = {
        tuple(sorted(tuple(int(at) for at in place) for place in group - group.min(axis=0)))
        for group in groups
    }
    return box_of(groups[0]) if len(corners) == 1 else None


def _slowest(granules: Sequence[Sequence[Ints]], fabric: Fabric) -> tuple[Reach, Sequence[Ints]]:
    """Returns the slowest granule's link capacity per group, and its groups.

    Every granule has its own links, which only its own groups share.
    """
    reached = [
        (reach_of_box_or_rings(groups, fabric.torus, fabric.wraps), groups) for groups in granules
    ]
    # Groups within single chips use no link, and wait for none.
    return min(reached, key=lambda one: (one[0].chips == 1, one[0].links))


def _span_shares(spans: Sequence[AxisSpan], fabric: Fabric, spreads: bool) -> Shares:
    """Returns how long each dimension is busy: equally long, except in an all-to-all.

    An all-to-all loads the middle of every dimension with a quarter of what its members hold, see
    `automesh.hardware.fabric.torus.reach`.
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
