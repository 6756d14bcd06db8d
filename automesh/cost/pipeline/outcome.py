"""What compiled stages say of the whole step: its memory, its work, its time (no jax)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from automesh.cost.pipeline.step import (
    Move,
    PipelineWork,
    Spent,
    StageMemory,
)
from automesh.outcomes import Collective, CompiledPipeline, Counts, Memory
from automesh.pipeline.actions import KIND_WORDS
from automesh.pipeline.schedule import Schedule, parse_schedule

UPDATE = "update"
"""What the optimizer's part of a stage is called beside the actions of a schedule."""


def schedule_of(pipeline: CompiledPipeline) -> Schedule:
    """The schedule that a pipeline was compiled for."""
    return parse_schedule(pipeline.actions, name=pipeline.schedule)


def worst_memory(pipeline: CompiledPipeline) -> Memory:
    """Of the device that needs most: what lasts is its arguments, the rest is temporary."""
    worst = max(pipeline.stages, key=lambda stage: stage.peak_bytes)
    lasting = sum(one.lasting_bytes for one in pipeline.stages if one.rank == worst.rank)
    return Memory(
        argument_bytes=lasting,
        output_bytes=lasting,
        alias_bytes=lasting,
        temporary_bytes=worst.peak_bytes - lasting,
        peak_bytes=worst.peak_bytes,
    )


def busiest_counts(pipeline: CompiledPipeline) -> Counts:
    """What one device does in a step, on the rank that has most to compute."""
    schedule = schedule_of(pipeline)
    totals: list[Counts] = []
    for rank, actions in enumerate(schedule.ranks):
        times = Counter((action.stage, str(action.kind)) for action in actions)
        totals.append(
            _added(
                [
                    (
                        1 if program.action == UPDATE else times[program.stage, program.action],
                        program.counts,
                    )
                    for program in pipeline.programs
                    if schedule.homes[program.stage] == rank
                ]
            )
        )
    return max(totals, key=lambda counts: (counts.flops, counts.hbm_bytes))


def _added(runs: Sequence[tuple[int, Counts]]) -> Counts:
    collectives: dict[tuple[str, tuple[str, ...], int], Collective] = {}
    for times, counts in runs:
        for one in counts.collectives:
            key = (one.kind, one.axes, one.group_size)
            known = collectives.get(key, replace(one, count=0, payload_bytes=0, wire_bytes=0))
            collectives[key] = replace(
                one,
                count=known.count + times * one.count,
                payload_bytes=known.payload_bytes + times * one.payload_bytes,
                wire_bytes=known.wire_bytes + times * one.wire_bytes,
            )
    return Counts(
        flops=sum(times * counts.flops for times, counts in runs),
        hbm_bytes=sum(times * counts.hbm_bytes for times, counts in runs),
        collectives=tuple(collectives.values()),
        uncounted=tuple(dict.fromkeys(what for _, one in runs for what in one.uncounted)),
    )


def neighbours(schedule: Schedule, *, forward: bool) -> tuple[int, ...]:
    """Of each stage the one that its results, or its gradients, go to; -1 for none."""
    last = schedule.num_stages - 1
    if forward:
        return tuple(stage + 1 if stage < last else -1 for stage in range(last + 1))
    return tuple(stage - 1 for stage in range(last + 1))


def work_of(
    pipeline: CompiledPipeline,
    spent: Mapping[tuple[int, str], Spent],
    *,
    to_next: Sequence[Move],
    to_previous: Sequence[Move],
) -> PipelineWork:
    """The work of a step whose programs were compiled, to be priced or drawn.

    Args:
      spent: of each program, by stage and action, one execution.
      to_next, to_previous: of each stage what it sends for one microbatch.
    """
    stages = range(len(pipeline.stages))
    return PipelineWork(
        programs={
            (stage, kind): spent[stage, kind]
            for stage in stages
            for kind in KIND_WORDS
            if (stage, kind) in spent
        },
        to_next=to_next,
        to_previous=to_previous,
        memory=[
            StageMemory(
                lasting=one.lasting_bytes,
                activation=one.activation_bytes,
                working=one.working_bytes,
                finishing=one.finishing_bytes,
            )
            for one in pipeline.stages
        ],
        finish=[spent[stage, UPDATE] for stage in stages],
    )
