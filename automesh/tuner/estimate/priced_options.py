"""Compiler options in prices: plans that differ in them alone share their propagations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from automesh.cost.terms import Terms
from automesh.cost.windowed import THRESHOLDS, under_options
from automesh.hardware.fabric.fabric import Layouts
from automesh.mesh.axes import Plan, Scalar
from automesh.mesh.plan_arrays import Batch
from automesh.outcomes import Estimated
from automesh.tuner.estimate.propagations import Active


class Prices(Protocol):
    """The prices of one batch of meshes."""

    @property
    def needs_own(self) -> NDArray[np.bool_]:
        """[meshes]: True where the terms do not hold."""
        ...

    def estimated(self, row: int) -> Estimated:
        """The price of one mesh."""
        ...


Price = Callable[[Mapping[Active, Terms], Batch, Layouts], Prices]
_Options = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixed:
    """Prices of a batch in parts; `part` and `row` say where each mesh is."""

    parts: tuple[Prices, ...]
    part: NDArray[np.intp]
    row: NDArray[np.intp]
    needs_own: NDArray[np.bool_]

    def estimated(self, row: int) -> Estimated:
        """See `Prices`."""
        return self.parts[self.part[row]].estimated(int(self.row[row]))


def price_with_options(
    price: Price,
    terms: Mapping[Active, Terms],
    batch: Batch,
    layouts: Layouts,
    plans: Sequence[Plan],
) -> Prices:
    """Prices a batch, every mesh with the compiler options of its plan.

    Args:
      plans: whose meshes the batch has, in its order.
    """
    rows: dict[_Options, list[int]] = {}
    for row, plan in enumerate(plans):
        rows.setdefault(_priced(plan.compiler_options), []).append(row)
    if set(rows) <= {()}:
        return price(terms, batch, layouts)
    part, place = np.zeros((2, len(plans)), np.intp)
    needs_own = np.zeros(len(plans), np.bool_)
    parts: list[Prices] = []
    for number, (options, members) in enumerate(rows.items()):
        mine = Batch(names=batch.names, ici=batch.ici[members], dcn=batch.dcn[members])
        made = {active: under_options(one, options) for active, one in terms.items()}
        prices = price(made, mine, layouts)
        part[members], place[members] = number, np.arange(len(members))
        needs_own[members] = prices.needs_own
        parts.append(prices)
    return _Mixed(parts=tuple(parts), part=part, row=place, needs_own=needs_own)


def _priced(options: _Options) -> _Options:
    """Those options that a price depends on."""
    return tuple(one for one in options if one[0] in THRESHOLDS.values())


def unpriced_notice(plans: Sequence[Plan], platform: str) -> str:
    """Which compiler options among the plans' leave all prices as they are; empty if none does."""
    names = dict.fromkeys(name for plan in plans for name, _ in plan.compiler_options)
    without = [f"`{name}`" for name in names if name != THRESHOLDS.get(platform)]
    if not without:
        return ""
    listed = " and ".join(filter(None, [", ".join(without[:-1]), without[-1]]))
    return (
        f"the estimate does not see what {listed} {'does' if len(without) == 1 else 'do'}: plans "
        "that differ in nothing else have the same estimate, and only a compile tells them apart"
    )
