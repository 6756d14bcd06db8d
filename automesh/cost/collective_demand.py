"""The network traffic of a step: how often, how much, and what can hide behind compute."""

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
      is_ring: True for the ring of a windowed multiplication, which takes `windowed.ring_seconds`
        and only overlaps with such multiplications.
    """

    counts: Floats
    payload_bytes: Floats
    is_ring: Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandGroup:
    """Collectives over the same axes whose demand depends on the same parts of the sizes.

    Attributes:
      axes: mesh axes that they run over.
      members: indices into `Collectives.works`.
      parts: products of axis sizes that the demand depends on.
      rings: members that may be windowed rings, which the demand depends on as well.
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
            if work.axes:  # else every group is one device, and XLA removes the collective
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
        """Returns the collectives executed per step, [sizes], from `Formulas.values`."""
        return total(self._counts.at(values))

    def demand(self, sizes: Sizes) -> Demand:
        """Computes the demand of each collective."""
        values = self._formulas.values(sizes)
        counts = self._counts.at(values)
        rings = self._rings(values, sizes)
        return Demand(counts=counts, payload_bytes=self._payloads.at(values), is_ring=rings)

    def _rings(self, values: Floats, sizes: Sizes) -> NDArray[np.bool_]:
        """Finds the collectives that are windowed rings: [works, sizes]."""
        whole, intensities = self._whole.at(values), self._intensities.at(values)
        rings = np.zeros(whole.shape, np.bool_)
        for place, work in enumerate(self.works):
            if work.windowed:
                ring = product_of(work.axes, self._axes, sizes)
                rings[place] = windows(self._terms, ring, whole[place], intensities[place])
        return rings

    def slower(self, work: CollectiveTerm) -> float:
        """Returns the factor by which a collective is slower than its kind.

        A reduce-scatter that the compiler leaves as an all-reduce is.
        """
        is_whole = work.kind == "reduce-scatter" and set(work.axes) == set(self._terms.active)
        return scheduling_of(self._terms.platform).whole_sum_cost if is_whole else 1.0

    def distinct_demands(self, group: DemandGroup, sizes: Sizes) -> Distinct:
        """Groups the sizes at which the collectives of one group have the same demand."""
        columns = [product_of(part, self._axes, sizes) for part in sorted(group.parts)]
        if group.rings:
            rings = self._rings(self._formulas.values(sizes), sizes)[list(group.rings)]
            columns += list(np.unique(rings, axis=0).astype(np.int64))
        return distinct(columns, len(sizes))

    def _grouped(self, counts: list[Sum]) -> tuple[DemandGroup, ...]:
        found: dict[tuple[tuple[str, ...], frozenset[tuple[str, ...]], bool], list[int]] = {}
        for place, (work, count) in enumerate(zip(self.works, counts, strict=True)):
            powers = [one.powers for one in (*work.payload_bytes, *work.whole_bytes, *count)]
            key = (work.axes, _parts(powers, self._axes), work.windowed)
            found.setdefault(key, []).append(place)
        return tuple(
            DemandGroup(
                axes=axes,
                members=tuple(members),
                parts=parts,
                rings=tuple(members) if windowed else (),
            )
            for (axes, parts, windowed), members in found.items()
        )


def unnamed(term: CollectiveTerm, active: tuple[str, ...]) -> CollectiveTerm:
    """Returns a copy without count and names, which do not change the time of one execution."""
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
    """Finds the products of axis sizes on which products of powers depend.

    Axes that always occur together, with the same power, matter by the product of their sizes.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for axis in axes:
        profile = tuple(dict(power).get(axis, 0) for power in powers)
        if any(profile):
            together.setdefault(profile, []).append(axis)
    return frozenset(tuple(part) for part in together.values())
