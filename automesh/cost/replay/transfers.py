"""How long transfers of a scheduled program take, and on which wires."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from automesh.collectives import is_kind, priced_as
from automesh.cost.replay.program import Flight, Use, ticks
from automesh.hardware.calibration.engines import engines_of
from automesh.hardware.fabric.fabric import Route
from automesh.hardware.fabric.links import DCN, HOST, LinkMap, LinkUse, Pairs
from automesh.hardware.fabric.placement import Placement
from automesh.hardware.model import HardwareModel
from automesh.hlo.schedule.nouns import Transfer
from automesh.mesh.axes import MeshAxis

Seconds = tuple[float, float, float]


class Flights:
    """Prices transfers; those of one pattern and size once.

    Args:
      axes: of the mesh, in order.
      patterns: of messages between pairs whose links are told apart, see `LinkMap`.
    """

    def __init__(
        self,
        axes: Sequence[MeshAxis],
        hardware: HardwareModel,
        patterns: Sequence[Pairs] = (),
    ) -> None:
        self._sizes = {axis.name: axis.size for axis in axes}
        self._fabric = fabric = hardware.fabric
        self._speeds = hardware.speeds
        self._host_bytes_per_s = engines_of(fabric.chip).host_bytes_per_s
        self._links = LinkMap(Placement(axes, fabric, hardware.layouts), hardware.layouts, patterns)
        self._known: dict[tuple[object, ...], tuple[Seconds, Seconds, LinkUse]] = {}

    def flight(self, one: Transfer) -> Flight:
        """The flight of one transfer."""
        if one.medium == "memory":
            # Read and written again: twice what is copied, unless one side is on the chip.
            moved = one.hbm_bytes or one.payload_bytes
            spent = ticks(moved / self._speeds.memory_bytes_per_s)
            return Flight(name=one.name, memory=spent, source=one.source)
        if one.medium == "host":
            return self._to_host(one)
        return self._to_others(one)

    def _to_host(self, one: Transfer) -> Flight:
        spent = ticks(one.payload_bytes / self._host_bytes_per_s)
        latency = ticks(self._speeds.kernel_overhead_s)
        return Flight(
            name=one.name,
            latency=latency,
            uses=(Use(resource=HOST, ticks=spent, cause=HOST),),
            alone=((HOST, spent + latency),),
            source=one.source,
        )

    def _to_others(self, one: Transfer) -> Flight:
        (latency, ici, dcn), apart, wires = self._priced(one)
        names = "+".join(one.axes) or "other groups"
        inside, between = f"ici {names}", f"dcn {names}"
        uses: list[Use] = []
        if apart[2]:
            # Messages to other granules leave beside those that stay.
            uses.append(Use(resource=DCN, ticks=ticks(apart[2]), cause=between))
        if dcn:
            uses.append(
                Use(
                    resource=DCN,
                    ticks=ticks(dcn),
                    cause=between,
                    tail=ticks(ici),
                    tail_cause=inside,
                )
            )
        for wire, share in wires.shares:
            uses.append(self._inner_use(wire, ici * share, dcn, (inside, between)))
        return Flight(
            name=one.name,
            latency=ticks(max(latency, apart[0])),
            uses=tuple(use for use in uses if use.ticks or use.tail),
            alone=_alone(uses, ticks(max(latency, apart[0])), inside, between),
            source=one.source,
        )

    def _inner_use(self, wire: str, ici: float, dcn: float, causes: tuple[str, str]) -> Use:
        inside, between = causes
        if dcn and self._fabric.kind != "torus":
            # One ring runs through all granules: its links inside are taken as long as it turns.
            return Use(resource=wire, ticks=ticks(ici) + ticks(dcn), cause=between)
        return Use(
            resource=wire, ticks=ticks(ici), cause=inside, tail=ticks(dcn), tail_cause=between
        )

    def _priced(self, one: Transfer) -> tuple[Seconds, Seconds, LinkUse]:
        """Seconds of latency, inside and between granules; of messages apart the same; wires."""
        kind = priced_as(one.kind) if is_kind(one.kind) else one.kind
        key = (kind, one.medium, one.axes, one.groups, one.pairs, one.payload_bytes, one.group_size)
        if key not in self._known:
            wires = self._wires(one, kind)
            main = self._seconds(kind, one.payload_bytes, wires.route)
            further = wires.further_hops * self._fabric.chip.link_latency_s
            apart = (0.0, 0.0, 0.0)
            if wires.apart is not None:
                apart = self._seconds(kind, one.payload_bytes, wires.apart)
            self._known[key] = ((main[0] + further, *main[1:]), apart, wires)
        return self._known[key]

    def _wires(self, one: Transfer, kind: str) -> LinkUse:
        if one.pairs or (kind == "collective-permute" and not one.groups):
            return self._links.of_pairs(one.pairs)
        spreads = kind == "all-to-all"
        whole = math.prod(self._sizes[name] for name in one.axes)
        if one.axes and whole == one.group_size:
            return self._links.of_axes(one.axes, spreads=spreads)
        groups = one.groups or (tuple(range(math.prod(self._sizes.values()))),)
        return self._links.of_groups(groups, spreads=spreads)

    def _seconds(self, kind: str, payload_bytes: int, route: Route) -> Seconds:
        found = self._speeds.collective_s(kind, np.array([float(payload_bytes)]), route)
        return float(found.latency_s[0]), float(found.ici_s[0]), float(found.dcn_s[0])


def _alone(
    uses: Sequence[Use], latency: int, inside: str, between: str
) -> tuple[tuple[str, int], ...]:
    """What a flight takes alone, inside and between granules; latency goes with the larger part."""
    longest = max(uses, key=lambda use: use.ticks + use.tail, default=None)
    if longest is None:
        return ((inside, latency),) if latency else ()
    parts = {inside: 0, between: 0}
    parts[longest.cause] += longest.ticks
    if longest.tail:
        parts[longest.tail_cause] += longest.tail
    parts[max(parts, key=lambda name: parts[name])] += latency
    return tuple((name, spent) for name, spent in parts.items() if spent)
