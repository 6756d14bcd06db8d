"""Prices communication: each distinct pair of a route and a demand once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automesh.collectives import priced_as
from automesh.cost.collective_demand import Collectives, Demand, DemandGroup, Flags
from automesh.cost.route_table import AxisRoutes, RouteTable
from automesh.cost.terms import CollectiveTerm
from automesh.cost.unique_rows import Codes, distinct, joined
from automesh.cost.windowed import ring_seconds
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Floats
from automesh.mesh.plan_arrays import Sizes

_SMALL = 1024  # up to so many pairs of route and demand are all priced, whether they occur or not


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRoutes:
    """Indices of the plans of one set of active axes; every field is [plans].

    Attributes:
      ici, dcn: indices into `RouteTable.ici` and `RouteTable.dcn`.
      size: index into the distinct sizes.
    """

    ici: Codes
    dcn: Codes
    size: Codes

    def __len__(self) -> int:
        return len(self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of route and demand of one group, which decide its time.

    Attributes:
      axis_routes: of the group's axes.
      demand: [sizes] number of the demand at these sizes.
      demands: how many demands there are.
      route, size: [pairs] index into `axis_routes.routes`, and into the distinct sizes.
      key: [plans] index of a plan's pair, if only pairs that occur are kept; None if a pair's index
        is its route times `demands` plus its demand.
    """

    group: DemandGroup
    axis_routes: AxisRoutes
    demand: Codes
    demands: int
    route: Codes
    size: Codes
    key: Codes | None

    def of(self, plan_routes: PlanRoutes, plans: slice) -> Codes:
        """Returns the indices of the pairs of some plans."""
        if self.key is not None:
            return self.key[plans]
        return _numbers(self.axis_routes, self.demand, self.demands, plan_routes, plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One collective of a group on each of its pairs.

    Attributes:
      work: of `Collectives.works`.
      counts: [pairs] executions per step.
      payload_bytes: [pairs] of one.
      is_ring: [pairs] see `Demand.is_ring`.
      seconds: [3, pairs] latency, ICI and DCN seconds of one.
      alone_s: [pairs] seconds of one without the factor of `slower`.
    """

    work: CollectiveTerm
    counts: Floats
    payload_bytes: Floats
    is_ring: Flags
    seconds: Floats
    alone_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Seconds of one group of collectives.

    Attributes:
      table: [columns, pairs]: latency, ICI and DCN seconds that are exposed, the seconds of all
        members without the factor of `slower`, then latency, ICI and DCN seconds that may hide, for
        each of `regions`.
      regions: indices into `KernelSeconds.regions_s`.
      is_exposed: False if none of it is exposed on any pair.
    """

    pairs: Pairs
    table: Floats
    regions: tuple[int, ...]
    is_exposed: bool


def priced_groups(
    collectives: Collectives,
    sizes: Sizes,
    plan_routes: PlanRoutes,
    route_table: RouteTable,
    speeds: Speeds,
    *,
    regions: int,
) -> list[Priced]:
    """Prices all collectives of one set of active axes on many plans.

    Args:
      sizes: [sizes, axes] distinct sizes.
      regions: of the step.
    """
    pieces = pieces_of_groups(collectives, sizes, plan_routes, route_table, speeds)
    return [_tabulated(pairs, members, regions=regions) for pairs, members in pieces]


def pieces_of_groups(
    collectives: Collectives,
    sizes: Sizes,
    plan_routes: PlanRoutes,
    route_table: RouteTable,
    speeds: Speeds,
) -> Iterator[tuple[Pairs, list[Piece]]]:
    """Prices the collectives one by one, group after group; see `priced_groups`."""
    pairs = [
        _pairs(collectives, group, sizes, plan_routes, route_table) for group in collectives.groups
    ]
    if not pairs:
        return
    # Demands are computed once for all sizes that share one.
    every = np.concatenate([pair.size for pair in pairs])
    asked = distinct([every], len(every))
    demand = collectives.demand(sizes[every[asked.first]])
    ends = np.cumsum([len(pair.size) for pair in pairs])
    columns = np.split(asked.inverse, ends[:-1])
    seconds = _seconds(collectives, demand, pairs, columns, speeds)
    for one, column, times in zip(pairs, columns, seconds, strict=True):
        members = zip(one.group.members, times, strict=True)
        yield (
            one,
            [_piece(collectives, demand, one, column, *member, speeds) for member in members],
        )


def _numbers(
    axis_routes: AxisRoutes, demand: Codes, demands: int, plan_routes: PlanRoutes, plans: slice
) -> Codes:
    return (
        axis_routes.taken(plan_routes.ici[plans], plan_routes.dcn[plans]) * demands
        + demand[plan_routes.size[plans]]
    )


def _pairs(
    collectives: Collectives,
    group: DemandGroup,
    sizes: Sizes,
    plan_routes: PlanRoutes,
    route_table: RouteTable,
) -> Pairs:
    asked = collectives.distinct_demands(group, sizes)
    axis_routes = route_table.of(group.axes)
    routes, demands, key = len(axis_routes), len(asked), None
    if routes * demands <= max(_SMALL, len(plan_routes) // 8):
        route = np.repeat(np.arange(routes), demands)
        size = np.tile(asked.first, routes)
    else:
        number = _numbers(axis_routes, asked.inverse, demands, plan_routes, slice(None))
        found = distinct([number], len(plan_routes))
        route = number[found.first] // demands
        size = asked.first[number[found.first] % demands]
        key = found.inverse
    return Pairs(
        group=group,
        axis_routes=axis_routes,
        demand=asked.inverse,
        demands=demands,
        route=route,
        size=size,
        key=key,
    )


def _seconds(
    collectives: Collectives,
    demand: Demand,
    pairs: Sequence[Pairs],
    columns: Sequence[Codes],
    speeds: Speeds,
) -> list[Floats]:
    """Computes the seconds of one execution: for each group [members, 3, pairs], in one call for
    each kind.

    Args:
      columns: per group, the column of `demand` of each of its pairs.
    """
    found = [np.zeros((len(pair.group.members), 3, len(pair.route))) for pair in pairs]
    by_kind: dict[str, list[tuple[int, int, int]]] = {}
    for place, one in enumerate(pairs):
        for position, member in enumerate(one.group.members):
            by_kind.setdefault(collectives.works[member].kind, []).append((place, position, member))
    for kind, asked in by_kind.items():
        payload = np.concatenate(
            [demand.payload_bytes[member, columns[place]] for place, _, member in asked]
        )
        routes = [pairs[place].axis_routes.routes.rows(pairs[place].route) for place, _, _ in asked]
        times = speeds.collective_s(priced_as(kind), payload, joined(routes))
        start = 0
        for place, position, _ in asked:
            here = slice(start, start + len(pairs[place].route))
            found[place][position] = times.latency_s[here], times.ici_s[here], times.dcn_s[here]
            start = here.stop
    return found


def _piece(
    collectives: Collectives,
    demand: Demand,
    pairs: Pairs,
    column: Codes,
    member: int,
    each: Floats,
    speeds: Speeds,
) -> Piece:
    """Prices one collective as the compiler makes it: as its kind, or as a ring.

    Args:
      each: [3, pairs] seconds of its kind.
    """
    work, is_ring = collectives.works[member], demand.is_ring[member, column]
    payload = demand.payload_bytes[member, column]
    seconds, alone = collectives.slower(work) * each, each[0] + each[1] + each[2]
    if work.windowed:
        ring = ring_seconds(payload, pairs.axis_routes.routes.rows(pairs.route), speeds)
        seconds = np.where(is_ring, ring, seconds)
        alone = np.where(is_ring, ring[0] + ring[1] + ring[2], alone)
    return Piece(
        work=work,
        counts=demand.counts[member, column],
        payload_bytes=payload,
        is_ring=is_ring,
        seconds=seconds,
        alone_s=alone,
    )


def _tabulated(pairs: Pairs, members: Sequence[Piece], *, regions: int) -> Priced:
    exposed = np.zeros((4, len(pairs.route)))
    hidden: dict[int, Floats] = {}
    for member in members:
        as_kind = np.where(member.is_ring, 0.0, member.counts)
        runs = [(regions + member.work.behind, np.where(member.is_ring, member.counts, 0.0))]
        # A ring hides behind windowed multiplications, any other collective behind its whole
        # region.
        if member.work.hides:
            runs.insert(0, (member.work.region, as_kind))
        else:
            exposed[:3] += as_kind * member.seconds
        exposed[3] += member.counts * member.alone_s
        for place, times in runs:
            if times.any():
                known = hidden.setdefault(place, np.zeros((3, len(pairs.route))))
                known += times * member.seconds
    order = tuple(sorted(hidden))
    table = np.concatenate([exposed, *(hidden[place] for place in order)])
    return Priced(pairs=pairs, table=table, regions=order, is_exposed=bool(exposed[:3].any()))
