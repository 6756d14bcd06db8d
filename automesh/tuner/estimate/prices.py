"""Prices plans under their compiler options; plans that differ only in these share propagations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from automesh.cost.pipeline.terms import PipelineTerms
from automesh.cost.priced_options import (
    is_priced,
    pipeline_under_options,
    priced_among,
    under_options,
)
from automesh.cost.terms import Terms
from automesh.hardware.fabric.fabric import Layouts
from automesh.mesh.axes import Plan, Scalar
from automesh.mesh.plan_arrays import Batch
from automesh.outcomes import Estimated
from automesh.tuner.estimate.propagations import Active


class Prices(Protocol):
    """The prices of one batch of meshes."""

    @property
    def needs_own(self) -> NDArray[np.bool_]:
        """[meshes]: True for meshes at which the terms do not hold."""
        ...

    @property
    def step_s(self) -> NDArray[np.float64]:
        """[meshes]: seconds of a step; undefined if the terms do not hold."""
        ...

    def estimated(self, row: int) -> Estimated:
        """Returns the price of one mesh."""
        ...


Price = Callable[[Mapping[Active, Terms], Batch, Layouts], Prices]
PricePipeline = Callable[[PipelineTerms, Terms, Batch, Layouts], Prices]
_Options = tuple[tuple[str, Scalar], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixed:
    """Prices of a batch in several parts; `part` and `row` give the place of each mesh."""

    parts: tuple[Prices, ...]
    part: NDArray[np.intp]
    row: NDArray[np.intp]
    needs_own: NDArray[np.bool_]
    step_s: NDArray[np.float64]

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
    """Prices a batch, each mesh under the compiler options of its plan.

    Args:
      plans: the plans of the batch's meshes, in the same order.
    """

    def priced(options: _Options, mine: Batch) -> Prices:
        made = {active: under_options(one, options) for active, one in terms.items()}
        return price(made, mine, layouts)

    return _by_options(priced, batch, plans)


def price_pipeline_with_options(
    price: PricePipeline,
    found: tuple[PipelineTerms, Terms],
    batch: Batch,
    layouts: Layouts,
    plans: Sequence[Plan],
) -> Prices:
    """Prices meshes with the same active axes and a pipeline; see `price_with_options`.

    Args:
      found: the pipeline, and the terms that decide at which meshes it holds.
    """
    pipeline, where = found

    def priced(options: _Options, mine: Batch) -> Prices:
        made = pipeline_under_options(pipeline, options) if options else pipeline
        return price(made, where, mine, layouts)

    return _by_options(priced, batch, plans)


def _by_options(
    price: Callable[[_Options, Batch], Prices], batch: Batch, plans: Sequence[Plan]
) -> Prices:
    rows: dict[_Options, list[int]] = {}
    for row, plan in enumerate(plans):
        rows.setdefault(priced_among(plan.compiler_options), []).append(row)
    if set(rows) <= {()}:
        return price((), batch)
    part, place = np.zeros((2, len(plans)), np.intp)
    needs_own, step_s = np.zeros(len(plans), np.bool_), np.zeros(len(plans))
    parts: list[Prices] = []
    for number, (options, members) in enumerate(rows.items()):
        mine = Batch(names=batch.names, ici=batch.ici[members], dcn=batch.dcn[members])
        prices = price(options, mine)
        part[members], place[members] = number, np.arange(len(members))
        needs_own[members], step_s[members] = prices.needs_own, prices.step_s
        parts.append(prices)
    return _Mixed(parts=tuple(parts), part=part, row=place, needs_own=needs_own, step_s=step_s)


def unpriced_notice(plans: Sequence[Plan], platform: str) -> str:
    """Returns a notice on compiler options that change no price; empty if there are none."""
    names = dict.fromkeys(name for plan in plans for name, _ in plan.compiler_options)
    without = [f"`{name}`" for name in names if not is_priced(name, platform)]
    if not without:
        return ""
    listed = " and ".join(filter(None, [", ".join(without[:-1]), without[-1]]))
    return (
        f"the estimate does not see what {listed} {'does' if len(without) == 1 else 'do'}: plans "
        "that differ in nothing else have the same estimate, and only a compile tells them apart"
    )
