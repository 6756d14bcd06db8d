"""Prices plans of a pipeline from the terms of its stages (numpy, no jax)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from automesh.cost.pipeline.outcome import neighbours
from automesh.cost.pipeline.step import (
    Move,
    PipelineCost,
    PipelineWork,
    Spent,
    StageMemory,
    price_pipelines,
    spent_of,
)
from automesh.cost.pipeline.terms import PipelineTerms, StageTerms
from automesh.cost.pipeline.transfers import batch_moves
from automesh.cost.pricing import PlanPrices, holds, price
from automesh.cost.terms import Terms, value_of
from automesh.hardware.fabric.fabric import Floats
from automesh.hardware.model import HardwareModel
from automesh.mesh.plan_arrays import Batch
from automesh.outcomes import Estimated, open_ended
from automesh.pipeline.actions import ActionKind
from automesh.pipeline.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrices:
    """The prices of a batch of meshes.

    Attributes:
      needs_own: [meshes]: True where the terms do not hold.
      costs: what a step takes, for the rows where they hold.
      uncounted: what has no price, in words.
    """

    needs_own: NDArray[np.bool_]
    costs: Mapping[int, PipelineCost]
    uncounted: tuple[str, ...]

    @property
    def step_s(self) -> Floats:
        """[meshes]: seconds of a step, NaN where the terms do not hold."""
        seconds = np.full(len(self.needs_own), np.nan)
        for row, cost in self.costs.items():
            seconds[row] = cost.step_s
        return seconds

    def estimated(self, row: int) -> Estimated:
        """Returns the price of one mesh.

        Raises:
          KeyError: it needs a propagation of its own.
        """
        cost = self.costs[row]
        return Estimated(
            step_s=cost.step_s,
            bracket_s=cost.bracket_s,
            bound_s=0.0 if open_ended(self.uncounted) else cost.bound_s,
            memory_bytes=cost.memory_bytes,
            causes=cost.causes,
            uncounted=self.uncounted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """The price of one program on many meshes.

    Attributes:
      beside: bytes that it has in addition to its arguments.
    """

    prices: PlanPrices
    spent: tuple[Spent, ...]
    beside: Floats


def price_pipeline_terms(
    pipeline: PipelineTerms,
    where: Terms,
    batch: Batch,
    *,
    hardware: HardwareModel,
) -> PipelinePrices:
    """Prices meshes of a pipeline, all with as many ranks as its terms were made for.

    Args:
      where: says for which meshes the terms hold.
      batch: with the same active axes in all rows.
      hardware: with the layouts of every ICI shape in the batch.
    """
    columns = [batch.names.index(axis) for axis in where.active]
    fits = holds(where, where.active, batch.sizes[:, columns])
    rows = np.flatnonzero(fits)
    if not len(rows):
        return PipelinePrices(needs_own=~fits, costs={}, uncounted=())
    mine = Batch(names=batch.names, ici=batch.ici[rows], dcn=batch.dcn[rows])

    def priced(terms: Terms) -> _Priced:
        whole = replace(terms, active=where.active, sampled=where.sampled, fixed=where.fixed)
        prices = price(
            {where.active: replace(whole, guards=(), limits=())},
            mine,
            hardware=hardware,
        )
        arguments = np.array([value_of(terms.argument_bytes, sizes) for sizes in _sizes(mine)])
        return _Priced(
            prices=prices,
            spent=tuple(spent_of(prices.estimated(row)) for row in range(len(mine))),
            beside=prices.memory_bytes.astype(np.float64) - arguments,
        )

    programs: list[dict[ActionKind, _Priced]] = [
        {kind: priced(terms) for kind, terms in one.programs} for one in pipeline.kinds
    ]
    finish = [priced(one.finish) for one in pipeline.kinds]
    each = zip(pipeline.kinds, programs, finish, strict=True)
    memory = [_memory(one, [*own.values()], last, mine) for one, own, last in each]
    schedule = pipeline.schedule.schedule()
    to_next, to_previous = _moves(pipeline, schedule, mine, hardware)
    works = [
        PipelineWork(
            programs={
                (stage, kind): one.spent[row]
                for stage, number in enumerate(pipeline.stages)
                for kind, one in programs[number].items()
            },
            to_next=[moves[row] for moves in to_next],
            to_previous=[moves[row] for moves in to_previous],
            memory=[memory[number][row] for number in pipeline.stages],
            finish=[finish[number].spent[row] for number in pipeline.stages],
        )
        for row in range(len(mine))
    ]
    costs = dict(zip(rows.tolist(), price_pipelines(schedule, works), strict=True))
    every = [*(one for own in programs for one in own.values()), *finish]
    said = (text for one in every for block in one.prices.blocks for text in block.uncounted)
    return PipelinePrices(needs_own=~fits, costs=costs, uncounted=tuple(dict.fromkeys(said)))


def _moves(
    pipeline: PipelineTerms,
    schedule: Schedule,
    batch: Batch,
    hardware: HardwareModel,
) -> tuple[list[list[Move]], list[list[Move]]]:
    """Prices what each stage sends forward and back, on each mesh."""
    route = hardware.routes(batch, (pipeline.axis,))
    kinds = [pipeline.kinds[number] for number in pipeline.stages]
    forward = [kind.outputs_bytes for kind in kinds]
    back = [kind.gradients_bytes for kind in kinds]
    first, second = (
        batch_moves(
            np.array([[value_of(one, sizes) for sizes in _sizes(batch)] for one in sent]),
            neighbours(schedule, forward=is_forward),
            schedule.homes,
            batch=batch,
            axis=pipeline.axis,
            route=route,
            speeds=hardware.speeds,
        )
        for sent, is_forward in ((forward, True), (back, False))
    )
    return first, second


def _sizes(batch: Batch) -> list[dict[str, int]]:
    return [dict(zip(batch.names, row, strict=True)) for row in batch.sizes.tolist()]


def _memory(
    stage: StageTerms, programs: Sequence[_Priced], finish: _Priced, batch: Batch
) -> list[StageMemory]:
    """Computes the memory of one device of a stage, for each mesh."""
    found: list[StageMemory] = []
    for row, sizes in enumerate(_sizes(batch)):
        lasting = (*stage.params_bytes, *stage.sums_bytes, *stage.state_bytes)
        # Gradients that have arrived from later stages are kept until its programs run.
        arrived = value_of(stage.outputs_bytes, sizes)
        working = max((float(program.beside[row]) for program in programs), default=0.0)
        found.append(
            StageMemory(
                lasting=round(value_of(lasting, sizes)),
                activation=round(value_of((*stage.inputs_bytes, *stage.saved_bytes), sizes)),
                working=round(working + arrived),
                finishing=round(float(finish.beside[row])),
            )
        )
    return found
