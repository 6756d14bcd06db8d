"""Adds pieces up to a step: decides what overlaps and what causes the seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.cost.collective_prices import PlanRoutes, Priced
from automesh.cost.kernels import KernelSeconds
from automesh.hardware.fabric.fabric import Floats

_CHUNK = 16384  # plans at a time, so that all arrays for them stay in the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step on many plans.

    Attributes:
      step_s, lower_s, upper_s: [plans].
      first_cause_s: [causes, plans] causes of as many plans as are computed at a time.
    """

    step_s: Floats
    lower_s: Floats
    upper_s: Floats
    first_cause_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """The overlap of the pieces of a step, on many plans.

    Central: a region takes the larger of its compute and of the communication that hides (of copies
    to and from the host first, then of collectives), plus what is exposed; rings of windowed
    multiplications hide behind these alone. The step takes at least lower. Lower: everything
    overlaps, except kernels with kernels and collectives with others over the same axes. Upper: the
    sum of all.

    Attributes:
      sets: of axes, that collectives run over.
      causes: names of the causes of seconds.
    """

    kernels: KernelSeconds
    groups: Sequence[Priced]
    plan_routes: PlanRoutes
    sets: tuple[tuple[str, ...], ...]
    causes: tuple[str, ...]

    @staticmethod
    def of(kernels: KernelSeconds, groups: Sequence[Priced], plan_routes: PlanRoutes) -> Overlap:
        """Makes the overlap of the plans in `plan_routes`."""
        sets = tuple(dict.fromkeys(group.pairs.group.axes for group in groups))
        names = ["+".join(axes) for axes in sets]
        host = ("host",) if kernels.host_s.any() else ()
        return Overlap(
            kernels=kernels,
            groups=groups,
            plan_routes=plan_routes,
            sets=sets,
            causes=("compute", "memory", *_of("ici", names), *_of("dcn", names), *host, "latency"),
        )

    def seconds(self) -> StepSeconds:
        """Computes the seconds of all plans."""
        plans = len(self.plan_routes)
        step_s, lower_s, upper_s = np.empty(plans), np.empty(plans), np.empty(plans)
        first = np.empty((len(self.causes), 0))
        for chunk in self._chunks():
            spent = self._spent(chunk)
            step_s[chunk], lower_s[chunk], upper_s[chunk] = (
                spent.step_s,
                spent.lower_s,
                spent.upper_s,
            )
            if not chunk.start:
                first = spent.cause_s
        return StepSeconds(step_s=step_s, lower_s=lower_s, upper_s=upper_s, first_cause_s=first)

    def cause_s(self, plans: slice) -> Floats:
        """Returns the seconds of each cause on some of the plans, [causes, plans]; they sum to
        `step_s`."""
        return self._spent(plans).cause_s

    def seconds_of(self, cause: str) -> Floats:
        """Returns the seconds of one cause: [plans]."""
        row = self.causes.index(cause)
        return np.concatenate([self.cause_s(chunk)[row] for chunk in self._chunks()])

    def _chunks(self) -> list[slice]:
        plans = len(self.plan_routes)
        return [slice(start, min(start + _CHUNK, plans)) for start in range(0, plans, _CHUNK)]

    def _spent(self, chunk: slice) -> _Spent:
        """Computes the seconds of one chunk of the plans."""
        kernels, sets = self.kernels, self.sets
        size = self.plan_routes.size[chunk]
        causes = np.zeros((len(self.causes), len(size)))
        causes[0] = kernels.compute_s[size]
        causes[1] = kernels.memory_s[size]
        if "host" in self.causes:
            causes[-2] = kernels.host_s[size]
        latency = causes[-1]
        latency += kernels.overhead_s[size]
        longest = kernels.least_s[size]
        serial = kernels.serial_s[size]
        alone = np.zeros((len(sets), len(size)))
        hiding: list[list[tuple[int, Sequence[Floats]]]] = [[] for _ in kernels.regions_s]
        for group in self.groups:
            pair = group.pairs.of(self.plan_routes, chunk)
            place = sets.index(group.pairs.group.axes)
            # Column by column: NumPy looks up single numbers far faster than rows.
            if group.is_exposed:
                seconds = [column[pair] for column in group.table[:3]]
                _add(causes, place, len(sets), seconds)
                serial += seconds[0] + seconds[1] + seconds[2]
            alone[place] += group.table[3][pair]
            for number, region in enumerate(group.regions):
                columns = group.table[4 + 3 * number : 7 + 3 * number]
                hiding[region].append((place, [column[pair] for column in columns]))
        for region, parts in enumerate(hiding):
            if parts:
                wanted = np.zeros(len(size))
                for _, part in parts:
                    wanted += part[0] + part[1] + part[2]
                beside = kernels.regions_s[region][size]
                serial += wanted
                share = np.maximum(wanted - beside, 0.0) / np.maximum(wanted, np.finfo(float).tiny)
                for place, part in parts:
                    _add(causes, place, len(sets), [each * share for each in part])
        step = np.empty(len(size))
        _sum(causes, step)
        if len(sets):
            np.maximum(longest, alone.max(axis=0), out=longest)
            if (longest > step).any():
                missing = np.maximum(longest - step, 0.0)
                _lengthen(causes, missing, alone.argmax(axis=0), hiding, sets=len(sets))
                _sum(causes, step)
        # Sums in another order may differ in the last digit.
        return _Spent(
            cause_s=causes,
            step_s=step,
            lower_s=np.minimum(longest, step),
            upper_s=np.maximum(serial, step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spent:
    """The fields of `StepSeconds` and all causes, [causes, plans], for some plans."""

    cause_s: Floats
    step_s: Floats
    lower_s: Floats
    upper_s: Floats


def _sum(rows: Floats, into: Floats) -> None:
    into[:] = 0.0
    for row in rows:
        into += row


def _lengthen(
    causes: Floats,
    missing: Floats,
    busiest: NDArray[np.intp],
    hiding: Sequence[Sequence[tuple[int, Sequence[Floats]]]],
    *,
    sets: int,
) -> None:
    """Lengthens steps that are shorter than the communication over their busiest axes.

    A ring and another collective over the same axes may each hide behind the same multiplication,
    but they also wait for each other.

    Args:
      missing, busiest: seconds, and the index of the set of axes, [plans].
      hiding: by region, indices and their latency, ICI and DCN seconds.
      sets: number of sets of axes.
    """
    parts = [one for region in hiding for one in region]
    for place in np.unique(busiest[missing > 0.0]):
        mine = [seconds for of, seconds in parts if of == place]
        hidden = sum((each for seconds in mine for each in seconds), np.zeros(len(missing)))
        wanted = np.where((busiest == place) & (hidden > 0.0), missing, 0.0)
        share = wanted / np.maximum(hidden, np.finfo(float).tiny)
        for seconds in mine:
            _add(causes, int(place), sets, [each * share for each in seconds])


def _add(causes: Floats, place: int, sets: int, seconds: Sequence[Floats]) -> None:
    """Adds latency, ICI and DCN seconds, each [plans], over one set of axes to their causes."""
    causes[-1] += seconds[0]
    causes[2 + place] += seconds[1]
    causes[2 + sets + place] += seconds[2]


def _of(wires: str, names: Sequence[str]) -> list[str]:
    return [f"{wires} {name}" for name in names]
