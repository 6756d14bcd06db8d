"""Prices many plans at once: time, its causes, and memory.

Whatever depends on a part of a plan only is computed once per distinct part: kernels and memory
depend on the total sizes of the axes, a collective depends on the links of its own axes and on the
sizes that divide its payload. Only the overlap of the two is computed plan by plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from automesh.cost.collective_demand import Collectives
from automesh.cost.collective_prices import PlanRoutes, priced_groups
from automesh.cost.formulas import Formulas, with_copies
from automesh.cost.kernels import DistinctKernels, KernelSeconds, product_of
from automesh.cost.overlap import Overlap
from automesh.cost.route_table import RoutesOf, RouteTable
from automesh.cost.terms import Footprint, Kernel, Terms, Uncounted
from automesh.cost.unique_rows import Codes, distinct, joined
from automesh.cost.windowed import for_windows
from automesh.hardware.calibration.speeds import Speeds
from automesh.hardware.fabric.fabric import Floats
from automesh.hardware.model import HardwareModel
from automesh.mesh.plan_arrays import Batch, Sizes
from automesh.outcomes import Estimated, largest_first, open_ended

# Memory of one device, for many sizes of one set of active axes.

_MOST_COMPARED = 512  # with more memory points, those that never are the peak are not removed


class Peak:
    """Formulas of a step's memory: arguments, outputs, and the temporaries at every point."""

    def __init__(self, terms: Terms | Footprint, formulas: Formulas) -> None:
        lasting = (terms.argument_bytes, terms.output_bytes, terms.alias_bytes, terms.reread_bytes)
        points = formulas.matrix([point.bytes for point in terms.points])
        self._points = _undominated(points)
        self._lasting = formulas.matrix(lasting)
        self._on_chip_bytes = terms.on_chip_bytes

    def argument_bytes(self, values: Floats) -> Floats:
        """Returns the bytes of the arguments, [sizes], from `Formulas.values`."""
        return np.rint(self._lasting[0] @ values[: self._lasting.shape[1]])

    def lasting_bytes(self, values: Floats) -> Floats:
        """Returns the bytes of arguments and outputs alone, which no compiler can reduce:
        [sizes]."""
        arguments, outputs, alias, _ = self._lasting @ values[: self._lasting.shape[1]]
        return np.rint(arguments + outputs - alias)

    def bytes(self, values: Floats) -> NDArray[np.int64]:
        """Returns the peak bytes: arguments, outputs without reused memory, and most temporaries:
        [sizes]."""
        arguments, outputs, alias, reread = self._lasting @ values[: self._lasting.shape[1]]
        temporaries = np.zeros(values.shape[1])
        if len(self._points):
            temporaries = (self._points @ values[: self._points.shape[1]]).max(axis=0)
        temporaries = with_copies(temporaries, reread, self._on_chip_bytes)
        # Rounded to bytes, since the last digit of a matrix product depends on the number of
        # meshes.
        return np.rint(arguments + temporaries + outputs - alias).astype(np.int64)


def _undominated(points: Floats) -> Floats:
    """Removes points that another point exceeds on every mesh, coefficient by coefficient."""
    points = np.unique(points, axis=0)
    if len(points) > _MOST_COMPARED:
        return points
    exceeds = (points[:, None, :] >= points[None, :, :]).all(axis=2)
    return points[exceeds.sum(axis=0) == 1]  # itself alone: no two are equal


# The prices of a batch of plans: seconds by cause, a bracket, a bound and bytes.


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBlock:
    """The causes of seconds of the plans with one set of active axes.

    Attributes:
      active: axes larger than 1.
      plans: [plans] their rows in the batch, ascending.
      overlap: how the pieces of these plans overlap.
      first_cause_s: [causes, plans] for the first plans; for others it is computed again on demand,
        since storing the causes of a million plans takes longer than computing them.
      uncounted: what has no price, in words.
      own: True if the terms were made for one mesh alone.
      memory_spread: see `Terms`.
    """

    active: tuple[str, ...]
    plans: Codes
    overlap: Overlap
    first_cause_s: Floats
    uncounted: tuple[str, ...]
    own: bool
    memory_spread: tuple[float, float] = (1 / 1.5, 1.5)

    def cause_s(self, column: int) -> Floats:
        """Returns the seconds of each of `overlap.causes` on one plan, by its index in `plans`."""
        if column < self.first_cause_s.shape[1]:
            return self.first_cause_s[:, column]
        return self.overlap.cause_s(slice(column, column + 1))[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrices:
    """The prices of a batch of plans; every array is [plans].

    Attributes:
      needs_own: True where the terms do not hold: the mesh needs a propagation of its own. All
        seconds are NaN there, and counts 0.
      step_s: central estimate.
      lower_s, upper_s: the time at the assumed speeds if everything overlaps that may, and the time
        if nothing does.
      bound_s: a proven lower limit; see `automesh.cost.pricing`.
      memory_bytes: peak on one device.
      lasting_bytes: of these, arguments and outputs.
      collectives: executed per step.
      blocks: causes, one block per set of active axes.
      block, column: index into `blocks`, and of the plan in its block.
    """

    needs_own: NDArray[np.bool_]
    step_s: Floats
    lower_s: Floats
    upper_s: Floats
    bound_s: Floats
    memory_bytes: NDArray[np.int64]
    lasting_bytes: Floats
    collectives: Floats
    blocks: tuple[CostBlock, ...]
    block: NDArray[np.int32]
    column: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.step_s)

    def estimated(self, row: int) -> Estimated:
        """Returns the estimate of one plan.

        Raises:
          ValueError: the plan needs a propagation of its own.
        """
        if self.needs_own[row]:
            raise ValueError(f"no terms hold for plan {row}: it needs a propagation of its own")
        block = self.blocks[self.block[row]]
        spent = block.cause_s(int(self.column[row]))
        seconds = zip(block.overlap.causes, spent.tolist(), strict=True)
        return Estimated(
            step_s=float(self.step_s[row]),
            bracket_s=(float(self.lower_s[row]), float(self.upper_s[row])),
            # A loop whose length depends on the data may not run at all.
            bound_s=0.0 if open_ended(block.uncounted) else float(self.bound_s[row]),
            memory_bytes=int(self.memory_bytes[row]),
            causes=largest_first(seconds),
            uncounted=block.uncounted,
            own_propagation=block.own,
            memory_interval=self._interval(row, block.memory_spread),
        )

    def _interval(self, row: int, spread: tuple[float, float]) -> tuple[int, int]:
        """Returns the interval of one plan's memory; see `Estimated`."""
        least, most = (round(part * int(self.memory_bytes[row])) for part in spread)
        return max(least, int(self.lasting_bytes[row])), most

    def cause_s(self, cause: str) -> Floats:
        """Returns the seconds of one cause: [plans], 0 for plans without it."""
        seconds = np.where(self.needs_own, np.nan, 0.0)
        for block in self.blocks:
            if cause in block.overlap.causes:
                seconds[block.plans] = block.overlap.seconds_of(cause)
        return seconds


# A time that no step can beat: the only figure that may rule a plan out.
#
# Kept apart from the estimate. It assumes of the hardware only `Speeds.bound_*` (no device of the
# kind can do more) and of the program only
#
# - that every multiplication in the terms is done, none by an algorithm that needs fewer operations
#   (XLA has none): the terms hold what is left after common subexpressions and dead code are gone;
# - that the arguments, which lie in device memory when a step starts, cross the memory bus once: a
#   train step reads all of them, since it updates all parameters. A step that leaves a part of its
#   arguments unread (a look-up in a frozen table) has kernels that touch less, so that no more than
#   the kernels' bytes are counted.
#
# The two may overlap completely, hence the larger one and not the sum. Communication is left out: a
# compiler may find a cheaper way to move data than the collectives that the terms name.


def bound_s(peak_s: Floats, argument_bytes: Floats, kernel_bytes: Floats, speeds: Speeds) -> Floats:
    """Returns the least seconds of a step; 0 if the speeds have no bound.

    Args:
      peak_s: all multiplications of the step at `Speeds.bound_flops_per_s`.
      argument_bytes: of one device.
      kernel_bytes: read and written by all kernels of a step.
    """
    if speeds.bound_memory_bytes_per_s <= 0.0:
        return peak_s
    through_memory = np.minimum(argument_bytes, kernel_bytes)
    return np.maximum(peak_s, through_memory / speeds.bound_memory_bytes_per_s)


_CHUNK = 512  # sizes at a time, so that 100 kernels on them stay in the processor's cache


def price_on(
    terms: Mapping[tuple[str, ...], Terms],
    batch: Batch,
    *,
    routes_of: RoutesOf,
    speeds: Speeds,
) -> PlanPrices:
    """Prices plans whose axes use the links that `routes_of` returns; see `pricing.price`."""
    route_table = RouteTable(batch, routes_of)
    shapes = route_table.sizes
    held = batch.ici[shapes.first] * batch.dcn[shapes.first]
    prices = _unpriced(len(batch))
    blocks: list[CostBlock] = []
    for active, own, of_set, plans in _sets(terms, batch, held, shapes.inverse):
        columns = [batch.names.index(axis) for axis in active]
        place = np.zeros(len(held), np.intp)
        place[of_set] = np.arange(len(of_set))
        plan_routes = PlanRoutes(
            ici=route_table.ici.inverse[plans],
            dcn=route_table.dcn.inverse[plans],
            size=place[shapes.inverse[plans]],
        )
        step = _StepFormulas(for_windows(own, speeds), active)
        prices.block[plans] = len(blocks)
        prices.column[plans] = np.arange(len(plans))
        blocks.append(
            step.priced(held[of_set][:, columns], plans, plan_routes, route_table, speeds, prices)
        )
    return replace(prices, blocks=tuple(blocks))


def _sets(
    terms: Mapping[tuple[str, ...], Terms], batch: Batch, held: Sizes, shape: Codes
) -> Iterator[tuple[tuple[str, ...], Terms, Codes, Codes]]:
    """Groups the plans of a batch by the terms that hold for them.

    Args:
      held: [shapes, axes] distinct sizes.
      shape: [plans] index of the plan's sizes.

    Yields:
      the active axes, their terms, rows of `held` and rows of the batch, both ascending.
    """
    above = held > 1
    found = distinct(list(above.T.astype(np.int64)), len(held))
    number = np.full(len(held), -1, np.int16 if len(found) < 1 << 15 else np.int64)
    sets: list[tuple[tuple[str, ...], Terms]] = []
    for place, row in enumerate(found.first):
        active = tuple(name for name, is_above in zip(batch.names, above[row]) if is_above)
        if active in terms:
            of_set = np.flatnonzero(found.inverse == place)
            columns = [batch.names.index(axis) for axis in active]
            fits = holds(terms[active], active, held[of_set][:, columns])
            number[of_set[fits]] = len(sets)
            sets.append((active, terms[active]))
    of_plans = number[shape]
    order = np.argsort(of_plans, kind="stable")
    ends = np.searchsorted(of_plans[order], np.arange(len(sets) + 1))
    for place, (active, own) in enumerate(sets):
        plans = order[ends[place] : ends[place + 1]]
        if len(plans):
            yield active, own, np.flatnonzero(number == place), plans


def holds(terms: Terms, active: tuple[str, ...], sizes: Sizes) -> NDArray[np.bool_]:
    """Whether terms hold at other sizes than they were made at: [meshes].

    Args:
      sizes: [meshes, axes] of the active axes.
    """
    fits = np.ones(len(sizes), np.bool_)
    for guard in terms.guards:
        fits &= guard.size % product_of(guard.axes, active, sizes) == 0
    sampled = dict(terms.sampled)
    made_at = np.array([sampled.get(axis, 1) for axis in active], np.int64)
    is_same = sizes == made_at
    for place, axis in enumerate(active):
        if axis in terms.fixed:
            fits &= is_same[:, place]
    for axis, limit in terms.limits:
        fits &= sizes[:, active.index(axis)] <= limit
    return fits | is_same.all(axis=1)


class _StepFormulas:
    """The formulas of one set of active axes, ready to be evaluated."""

    def __init__(self, terms: Terms, active: tuple[str, ...]) -> None:
        self._terms = terms
        self._formulas = Formulas(active)
        self._kernels = DistinctKernels(terms, self._formulas)
        self._collectives = Collectives(terms, self._formulas)
        self._peak = Peak(terms, self._formulas)
        self._first_peak = Peak(terms.first, self._formulas) if terms.first else None

    def priced(
        self,
        sizes: Sizes,
        plans: Codes,
        plan_routes: PlanRoutes,
        route_table: RouteTable,
        speeds: Speeds,
        prices: PlanPrices,
    ) -> CostBlock:
        """Fills the rows `plans` of `prices`.

        Args:
          sizes: [sizes, axes] distinct sizes of the active axes.
          plan_routes: the indices of each plan in them.
        """
        of_sizes = self._of_sizes(sizes, speeds)
        regions = len(self._terms.regions)
        groups = priced_groups(
            self._collectives, sizes, plan_routes, route_table, speeds, regions=regions
        )
        overlap = Overlap.of(of_sizes.kernels, groups, plan_routes)
        seconds = overlap.seconds()
        prices.needs_own[plans] = False
        prices.step_s[plans] = seconds.step_s
        prices.lower_s[plans] = seconds.lower_s
        prices.upper_s[plans] = seconds.upper_s
        prices.bound_s[plans] = of_sizes.bound_s[plan_routes.size]
        prices.memory_bytes[plans] = of_sizes.memory_bytes[plan_routes.size]
        prices.lasting_bytes[plans] = of_sizes.lasting_bytes[plan_routes.size]
        prices.collectives[plans] = of_sizes.collectives[plan_routes.size]
        return CostBlock(
            active=self._formulas.axes,
            plans=plans,
            overlap=overlap,
            first_cause_s=seconds.first_cause_s,
            uncounted=tuple(dict.fromkeys(_said(one) for one in self._terms.uncounted)),
            own=set(self._formulas.axes) <= set(self._terms.fixed),
            memory_spread=self._terms.memory_spread,
        )

    def _of_sizes(self, sizes: Sizes, speeds: Speeds) -> _OfSizes:
        """Prices whatever depends on the sizes alone, chunk by chunk."""
        starts = range(0, len(sizes), _CHUNK)
        return joined(
            [self._of_some_sizes(sizes[start : start + _CHUNK], speeds) for start in starts]
        )

    def _of_some_sizes(self, sizes: Sizes, speeds: Speeds) -> _OfSizes:
        if len(sizes) == 1:
            sizes = np.repeat(sizes, 2, axis=0)  # see `kernels.total`
        values = self._formulas.values(sizes)
        kernels = self._kernels.seconds(values, sizes, speeds)
        arguments = self._peak.argument_bytes(values)
        memory_bytes = self._peak.bytes(values)
        if self._first_peak is not None:
            memory_bytes = np.maximum(memory_bytes, self._first_peak.bytes(values))
        return _OfSizes(
            kernels=kernels,
            bound_s=bound_s(kernels.peak_s, arguments, kernels.bytes, speeds),
            memory_bytes=memory_bytes,
            lasting_bytes=self._peak.lasting_bytes(values),
            collectives=self._collectives.executed(values),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfSizes:
    """Prices that depend on the sizes of the axes alone; every array is [sizes]."""

    kernels: KernelSeconds
    bound_s: Floats
    memory_bytes: NDArray[np.int64]
    lasting_bytes: Floats
    collectives: Floats


def _said(one: Uncounted) -> str:
    where = f" ({one.source})" if one.source else ""
    return f"{one.what}{where}: {one.why}"


def _unpriced(plans: int) -> PlanPrices:
    return PlanPrices(
        needs_own=np.ones(plans, np.bool_),
        step_s=np.full(plans, np.nan),
        lower_s=np.full(plans, np.nan),
        upper_s=np.full(plans, np.nan),
        bound_s=np.full(plans, np.nan),
        memory_bytes=np.zeros(plans, np.int64),
        lasting_bytes=np.zeros(plans),
        collectives=np.zeros(plans),
        blocks=(),
        block=np.zeros(plans, np.int32),
        column=np.zeros(plans, np.int32),
    )


# The entry to pricing: terms of a step and plans of a fabric in, prices out (numpy, no jax).


def price(
    terms: Mapping[tuple[str, ...], Terms],
    batch: Batch,
    *,
    hardware: HardwareModel,
) -> PlanPrices:
    """Prices plans.

    Args:
      terms: the terms of the step for each set of active axes, which are in the order of the mesh.
      batch: meshes of the fabric. A mesh without terms, or at which its terms do not hold, is
        marked in `PlanPrices.needs_own`.
      hardware: with the layouts of every ICI shape in the batch.
    """
    return price_on(terms, batch, routes_of=hardware.routes, speeds=hardware.speeds)


# The least of a step on any mesh, by the terms of one mesh. Another set of active axes has the same
# products and the same arrays, each on one device at least in a part of `1 / devices`; only what
# its compiler fuses, and the copies that it gathers, may be fewer.

_FUSED_SHARE = 0.85
"""Part of the memory traffic that is counted: with fewer collectives more is fused."""
_COPIES_SHARE = 0.75
"""Part of the temporaries that is counted: with other axes nothing may be gathered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The limits that no estimate of a step is below, on any mesh of the same devices.

    Attributes:
      step_s: seconds.
      memory_bytes: least bytes that the compiler may need on one device; 0 if nothing is known.
    """

    step_s: float
    memory_bytes: float


def least_of(terms: Terms, *, speeds: Speeds, devices: int) -> Least | None:
    """Returns the least of a step on any mesh of so many devices, by its terms on one of them; None
    if they hold on one mesh alone, or a part of them has no price."""
    if terms.fixed or open_ended(tuple(_said(one) for one in terms.uncounted)):
        return None
    if any(map(_shrinks, terms.kernels)):
        return Least(step_s=0.0, memory_bytes=0.0)
    formulas = Formulas(())
    kernels, peak = DistinctKernels(terms, formulas), Peak(terms, formulas)
    values = formulas.values(np.ones((1, 0), np.int64))
    step_s = kernels.least_s(values, speeds, devices=devices, streamed=_FUSED_SHARE)
    spread, most = terms.memory_spread
    lasting = float(peak.lasting_bytes(values)[0])
    temporaries = max(float(peak.bytes(values)[0]) - lasting, 0.0)
    whole = max(lasting, spread * (lasting + _COPIES_SHARE * temporaries))
    return Least(step_s=step_s, memory_bytes=max(whole, 0.0) / devices if most else 0.0)


def _shrinks(kernel: Kernel) -> bool:
    """Whether a kernel does less on all devices together if an axis is larger, as attention does
    inside the blocks of a split sequence."""
    work = [(one.batch, one.m, one.n, one.k) for one in kernel.matmuls]
    work += [(one,) for one in kernel.bytes]
    for count in kernel.count:
        for factors in work:
            powers = Counter[str]()
            for one in (count, *factors):
                powers.update(dict(one.powers))
            if any(power < -1 for power in powers.values()):
                return True
    return False
