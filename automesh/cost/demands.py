"""What a step asks of the network: how often, how much, and what of it can hide behind compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.cost.distinct import Distinct, distinct
from automesh.cost.formulas import Formulas, Powers, Sums, added
from automesh.cost.kernels import product_of, total
from automesh.cost.terms import CollectiveTerm, Sum, Terms
from automesh.cost.windowed import windows
from automesh.hardware.fabric import Floats
from automesh.mesh.batch import Sizes

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """All collectives of a step; every field is [collectives, sizes].

    Attributes:
      payload_bytes: of one execution.
      exposed: executions that nothing hides.
      hidden: executions that run beside the compute of their region.
      windowed: True where it is the ring of a windowed multiplication.
    """

    payload_bytes: Floats
    exposed: Floats
    hidden: Floats
    windowed: Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Collectives over the same axes whose demand depends on the same parts of the sizes.

    Attributes:
      axes: that they talk over.
      members: places in `Collectives.works`.
      parts: products of axis sizes that decide the demand.
      rings: axes of windowed rings that decide it too, by whether they are long enough.
    """

    axes: tuple[str, ...]
    members: tuple[int, ...]
    parts: frozenset[tuple[str, ...]]
    rings: frozenset[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What decides the time of one execution of a collective."""

    region: int
    kind: str
    axes: tuple[str, ...]
    payload_bytes: Sum
    hides: bool
    windowed: bool

    @staticmethod
    def of(term: CollectiveTerm, active: tuple[str, ...]) -> Work:
        return Work(
            region=term.region,
            kind=term.kind,
            axes=tuple(axis for axis in active if axis in term.axes),
            payload_bytes=term.payload_bytes,
            hides=term.hides,
            windowed=term.windowed,
        )


class Collectives:
    """The collectives of one step; equal ones are merged.

    Attributes:
      works: the distinct ones, in the order of the program.
      groups: all of them, grouped.
    """

    def __init__(self, terms: Terms, formulas: Formulas) -> None:
        merged: dict[Work, list[Sum]] = {}
        for term in terms.collectives:
            work = Work.of(term, formulas.axes)
            if work.axes:  # else every group is one device, and XLA drops it
                merged.setdefault(work, []).append(term.count)
        self.works = tuple(merged)
        self._formulas = formulas
        self._axes = formulas.axes
        self._platform = terms.platform
        counts = [added(*sums) for sums in merged.values()]
        self._counts = Sums(formulas, counts)
        self._payloads = Sums(formulas, [work.payload_bytes for work in self.works])
        self.groups = self._grouped(counts)

    def executed(self, values: Floats) -> Floats:
        """Collectives executed per step, [sizes], from `Formulas.values`."""
        return total(self._counts.at(values))

    def demand(self, sizes: Sizes) -> Demand:
        """How much of each collective there is and how much of it is exposed.

        The terms say which collectives hide; the ring of a windowed multiplication always does.
        """
        values = self._formulas.values(sizes)
        counts = self._counts.at(values)
        exposed = np.zeros_like(counts)
        windowed = np.zeros(counts.shape, np.bool_)
        for place, work in enumerate(self.works):
            if work.windowed:
                ring = product_of(work.axes, self._axes, sizes)
                windowed[place] = windows(self._platform, ring)
            if not work.hides:
                exposed[place] = np.where(windowed[place], 0.0, counts[place])
        return Demand(
            payload_bytes=self._payloads.at(values),
            exposed=exposed,
            hidden=counts - exposed,
            windowed=windowed,
        )

    def distinct_demands(self, group: Group, sizes: Sizes) -> Distinct:
        """Which sizes ask the same of the network, as far as one group is concerned."""
        columns = [product_of(part, self._axes, sizes) for part in sorted(group.parts)]
        for ring in sorted(group.rings):
            devices = product_of(ring, self._axes, sizes)
            columns.append(windows(self._platform, devices).astype(np.int64))
        return distinct(columns, len(sizes))

    def _grouped(self, counts: list[Sum]) -> tuple[Group, ...]:
        found: dict[
            tuple[tuple[str, ...], frozenset[tuple[str, ...]], frozenset[tuple[str, ...]]],
            list[int],
        ] = {}
        for place, (work, count) in enumerate(zip(self.works, counts, strict=True)):
            powers = [one.powers for one in (*work.payload_bytes, *count)]
            rings = frozenset((work.axes,)) if work.windowed else frozenset[tuple[str, ...]]()
            found.setdefault((work.axes, _parts(powers, self._axes), rings), []).append(place)
        return tuple(
            Group(axes=axes, members=tuple(members), parts=parts, rings=rings)
            for (axes, parts, rings), members in found.items()
        )


def _parts(powers: list[Powers], axes: tuple[str, ...]) -> frozenset[tuple[str, ...]]:
    """Products of axis sizes that decide products of powers.

    Axes that always occur together, with the same power, matter by the product of their sizes.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for axis in axes:
        profile = tuple(dict(one).get(axis, 0) for one in powers)
        if any(profile):
            together.setdefault(profile, []).append(axis)
    return frozenset(tuple(part) for part in together.values())
