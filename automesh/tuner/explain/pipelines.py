"""Why a pipeline takes what it takes: the pieces of all programs of its busiest rank (pure
functions)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from automesh.cost.breakdown import MeshCost, RouteOf, break_down
from automesh.cost.pipeline.terms import PipelineTerms
from automesh.cost.terms import Terms
from automesh.hardware.calibration.speeds import Speeds
from automesh.outcomes import Estimated

_Run = tuple[int, MeshCost]


def break_down_pipeline(
    pipeline: PipelineTerms,
    where: Terms,
    estimated: Estimated,
    sizes: Mapping[str, int],
    *,
    speeds: Speeds,
    route_of: RouteOf,
) -> MeshCost:
    """Prices every piece of the work of the rank that has most to do.

    What ranks wait for each other is no piece of any program: only `estimated` has it.

    Args:
      where: has the axes that are larger than 1.
      estimated: of the plan.
      sizes: of all mesh axes.
      route_of: see `break_down`.
    """
    schedule = pipeline.schedule.schedule()
    times = Counter((one.stage, one.kind) for _, one in schedule.order)

    def priced(terms: Terms) -> MeshCost:
        whole = replace(terms, active=where.active)
        return break_down(whole, sizes, speeds=speeds, route_of=route_of)

    kinds = [
        ({kind: priced(terms) for kind, terms in one.programs}, priced(one.finish))
        for one in pipeline.kinds
    ]
    ranks: list[list[_Run]] = [[] for _ in range(schedule.num_ranks)]
    for stage, number in enumerate(pipeline.stages):
        programs, finish = kinds[number]
        runs = [(times[stage, kind], cost) for kind, cost in programs.items()]
        ranks[schedule.homes[stage]] += [*runs, (1, finish)]
    busiest = max(ranks, key=_seconds)
    return _together(busiest, estimated, tuple((axis, sizes[axis]) for axis in where.active))


def _seconds(runs: Sequence[_Run]) -> float:
    return sum(
        times * sum(piece.seconds for piece in (*cost.collectives, *cost.kernels))
        for times, cost in runs
    )


def _together(
    runs: Iterable[_Run], estimated: Estimated, sizes: tuple[tuple[str, int], ...]
) -> MeshCost:
    listed = tuple(runs)
    collectives = [
        replace(
            one,
            count=times * one.count,
            latency_s=times * one.latency_s,
            ici_s=times * one.ici_s,
            dcn_s=times * one.dcn_s,
        )
        for times, cost in listed
        for one in cost.collectives
    ]
    kernels = [
        replace(
            one,
            count=times * one.count,
            matmul_s=times * one.matmul_s,
            ideal_s=times * one.ideal_s,
            memory_s=times * one.memory_s,
            ring_s=times * one.ring_s,
            overhead_s=times * one.overhead_s,
        )
        for times, cost in listed
        for one in cost.kernels
    ]
    worst = max((cost for _, cost in listed), key=lambda cost: cost.peak_temporary_bytes)
    uncounted = dict.fromkeys(one for _, cost in listed for one in cost.uncounted)
    return MeshCost(
        sizes=sizes,
        collectives=tuple(sorted(collectives, key=lambda one: -one.seconds)),
        kernels=tuple(sorted(kernels, key=lambda one: -one.seconds)),
        peak_temporary_bytes=worst.peak_temporary_bytes,
        peak_source=worst.peak_source,
        # What lasts from one program to the next is the rest of the estimate.
        argument_bytes=max(estimated.memory_bytes - worst.peak_temporary_bytes, 0.0),
        output_bytes=0.0,
        alias_bytes=0.0,
        uncounted=tuple(uncounted),
    )
