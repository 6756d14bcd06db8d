"""From pieces to a step: what hides behind what, region by region, and what causes the seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.cost.collective_prices import PlanRoutes, Priced
from automesh.cost.kernels import KernelSeconds
from automesh.hardware.fabric.fabric import Floats

_CHUNK = 16384  # plans at a time: all that is computed for them stays in the processor's cache


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step on many plans.

    Attributes:
      step_s, lower_s, upper_s: [plans].
      causes: names of the rows of `cause_s`.
      cause_s: [causes, plans]; they sum to `step_s`.
    """

    step_s: Floats
    lower_s: Floats
    upper_s: Floats
    causes: tuple[str, ...]
    cause_s: Floats


def overlapped(
    kernels: KernelSeconds, groups: Sequence[Priced], plan_routes: PlanRoutes
) -> StepSeconds:
    """Lets communication run beside the compute of its region.

    Central: a region takes the larger of its compute and of the communication that hides (of copies
    to and from the host first, then of collectives), plus
    what is exposed; rings of windowed multiplications hide behind these alone. The step takes no
    less than lower. Lower: everything runs beside everything, but for kernels beside each other and
    collectives over the same axes beside each other. Upper: the sum of all.
    """
    sets = list(dict.fromkeys(group.pairs.group.axes for group in groups))
    names = ["+".join(axes) for axes in sets]
    host = ("host",) if kernels.host_s.any() else ()
    causes = ("compute", "memory", *_of("ici", names), *_of("dcn", names), *host, "latency")
    result = StepSeconds(
        step_s=np.empty(len(plan_routes)),
        lower_s=np.empty(len(plan_routes)),
        upper_s=np.empty(len(plan_routes)),
        causes=causes,
        cause_s=np.empty((len(causes), len(plan_routes))),
    )
    for start in range(0, len(plan_routes), _CHUNK):
        chunk = slice(start, min(start + _CHUNK, len(plan_routes)))
        _overlap(kernels, groups, plan_routes, result, chunk, sets=sets)
    return result


def _overlap(
    kernels: KernelSeconds,
    groups: Sequence[Priced],
    plan_routes: PlanRoutes,
    result: StepSeconds,
    chunk: slice,
    *,
    sets: Sequence[tuple[str, ...]],
) -> None:
    """Fills one chunk of `result`."""
    size = plan_routes.size[chunk]
    causes = result.cause_s[:, chunk]
    causes[0] = kernels.compute_s[size]
    causes[1] = kernels.memory_s[size]
    causes[2:] = 0.0
    if "host" in result.causes:
        causes[-2] = kernels.host_s[size]
    latency = causes[-1]
    latency += kernels.overhead_s[size]
    longest = kernels.least_s[size]
    serial = kernels.serial_s[size]
    alone = np.zeros((len(sets), len(size)))
    hiding: list[list[tuple[int, Sequence[Floats]]]] = [[] for _ in kernels.regions_s]
    for group in groups:
        pair = group.pairs.of(plan_routes, chunk)
        # Column by column: NumPy looks up single numbers far faster than rows.
        seconds = [column[pair] for column in group.table]
        place = sets.index(group.pairs.group.axes)
        _add(causes, place, len(sets), seconds[:3])
        serial += seconds[0] + seconds[1] + seconds[2]
        alone[place] += seconds[3]
        for number, region in enumerate(group.regions):
            hiding[region].append((place, seconds[4 + 3 * number : 7 + 3 * number]))
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
    step = result.step_s[chunk]
    _sum(causes, step)
    if len(sets):
        np.maximum(longest, alone.max(axis=0), out=longest)
        if (longest > step).any():
            missing = np.maximum(longest - step, 0.0)
            _lengthen(causes, missing, alone.argmax(axis=0), hiding, sets=len(sets))
            _sum(causes, step)
    # The same seconds added up in another order may differ in the last digit.
    np.minimum(longest, step, out=result.lower_s[chunk])
    np.maximum(serial, step, out=result.upper_s[chunk])


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
    """Adds what the busiest axes take longer than the step to what seemed to hide on them.

    A ring and another collective over the same axes may each hide behind the same multiplication,
    and yet wait for each other.

    Args:
      missing, busiest: seconds, and the place of the set of axes, [plans].
      hiding: by region, places and their latency, ICI and DCN seconds.
      sets: how many sets of axes there are.
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
