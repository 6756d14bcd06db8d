"""What a step asks of the network: how often, how much, and what of it can hide behind compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.cost.formulas import Formulas, Powers, Sums, added
from automesh.cost.kernels import product_of, total
from automesh.cost.terms import CollectiveTerm, Sum, Terms
from automesh.cost.unique_rows import Distinct, distinct
from automesh.cost.windowed import windows
from automesh.hardware.fabric.fabric import Floats
from automesh.mesh.plan_arrays import Sizes
from automesh.platforms import scheduling_of

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """All collectives of a step; every field is [collectives, sizes].

    Attributes:
      counts: executions per step.
      payload_bytes: of one execution.
      is_ring: True where it is the ring of a windowed multiplication, which takes as long as
        `windowed.ring_seconds` says and runs beside such multiplications only.
    """

    counts: Floats
    payload_bytes: Floats
    is_ring: Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Collectives over the same axes whose demand depends on the same parts of the sizes.

    Attributes:
      axes: that they talk over.
      members: places in `Collectives.works`.
      parts: products of axis sizes that decide the demand.
      rings: members that may be windowed rings: whether they are decides it too.
    """

    axes: tuple[str, ...]
    members: tuple[int, ...]
    parts: frozenset[tuple[str, ...]]
    rings: tuple[int, ...]


class Collectives:
    """The collectives of one step; equal ones are merged.

    Attributes:
      works: the distinct ones, as `unnamed` has them, in the order of the program.
      groups: all of them, grouped.
    """

    def __init__(self, terms: Terms, formulas: Formulas) -> None:
        merged: dict[CollectiveTerm, list[Sum]] = {}
        for term in terms.collectives:
            work = unnamed(term, formulas.axes)
            if work.axes:  # else every group is one device, and XLA drops it
                merged.setdefault(work, []).append(term.count)
        self.works = tuple(merged)
        self._formulas = formulas
        self._axes = formulas.axes
        self._terms = terms
        counts = [added(*sums) for sums in merged.values()]
        self._counts = Sums(formulas, counts)
        self._payloads = Sums(formulas, [work.payload_bytes for work in self.works])
        self._whole = Sums(formulas, [work.whole_bytes for work in self.works])
        self._intensities = Sums(formulas, [work.intensity for work in self.works])
        self.groups = self._grouped(counts)

    def executed(self, values: Floats) -> Floats:
        """Collectives executed per step, [sizes], from `Formulas.values`."""
        return total(self._counts.at(values))

    def demand(self, sizes: Sizes) -> Demand:
        """How much of each collective there is."""
        values = self._formulas.values(sizes)
        counts = self._counts.at(values)
        rings = self._rings(values, sizes)
        return Demand(counts=counts, payload_bytes=self._payloads.at(values), is_ring=rings)

    def _rings(self, values: Floats, sizes: Sizes) -> NDArray[np.bool_]:
        """Which collectives are windowed rings, [works, sizes]."""
        whole, intensities = self._whole.at(values), self._intensities.at(values)
        rings = np.zeros(whole.shape, np.bool_)
        for place, work in enumerate(self.works):
            if work.windowed:
                ring = product_of(work.axes, self._axes, sizes)
                rings[place] = windows(self._terms, ring, whole[place], intensities[place])
        return rings

    def slower(self, work: CollectiveTerm) -> float:
        """How much longer a collective takes than its kind says.

        A reduce-scatter that the compiler leaves an all-reduce does.
        """
        is_whole = work.kind == "reduce-scatter" and set(work.axes) == set(self._terms.active)
        return scheduling_of(self._terms.platform).whole_sum_cost if is_whole else 1.0

    def distinct_demands(self, group: Group, sizes: Sizes) -> Distinct:
        """Which sizes ask the same of the network, as far as one group is concerned."""
        columns = [product_of(part, self._axes, sizes) for part in sorted(group.parts)]
        if group.rings:
            rings = self._rings(self._formulas.values(sizes), sizes)[list(group.rings)]
            columns += list(np.unique(rings, axis=0).astype(np.int64))
        return distinct(columns, len(sizes))

    def _grouped(self, counts: list[Sum]) -> tuple[Group, ...]:
        found: dict[tuple[tuple[str, ...], frozenset[tuple[str, ...]], bool], list[int]] = {}
        for place, (work, count) in enumerate(zip(self.works, counts, strict=True)):
            powers = [one.powers for one in (*work.payload_bytes, *work.whole_bytes, *count)]
            key = (work.axes, _parts(powers, self._axes), work.windowed)
            found.setdefault(key, []).append(place)
        return tuple(
            Group(
                axes=axes,
                members=tuple(members),
                parts=parts,
                rings=tuple(members) if windowed else (),
            )
            for (axes, parts, windowed), members in found.items()
        )


def unnamed(term: CollectiveTerm, active: tuple[str, ...]) -> CollectiveTerm:
    """What decides the time of one execution: how often it runs and what it is called do not."""
    return CollectiveTerm(
        region=term.region,
        count=(),
        kind=term.kind,
        axes=tuple(axis for axis in active if axis in term.axes),
        payload_bytes=term.payload_bytes,
        hides=term.hides,
        windowed=term.windowed,
        whole_bytes=term.whole_bytes,
        intensity=term.intensity,
        ring_region=term.behind,
    )


def _parts(powers: list[Powers], axes: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    """Products of axis sizes that decide products of powers.

    Axes that always occur together, with the same power, matter by the product of their sizes.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for axis in axes:
        profile = tuple(dict(power).get(axis, 0) for power in powers)
        if any(profile):
            together.setdefault(profile, []).append(axis)
    return frozenset(tuple(part) for part in together.values())
