"""Derives memory, work and time of a whole pipeline step from its compiled stages (no jax)."""

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
from automesh.outcomes import Collective, Counts, Memory, PipelineOutcome
from automesh.pipeline.actions import KIND_WORDS
from automesh.pipeline.schedule import Schedule, parse_schedule

UPDATE = "update"
"""Name of the optimizer's part of a stage, next to the actions of a schedule."""


def schedule_of(pipeline: PipelineOutcome) -> Schedule:
    """Returns the schedule that a pipeline was compiled for."""
    return parse_schedule(pipeline.actions, name=pipeline.schedule)


def worst_memory(pipeline: PipelineOutcome) -> Memory:
    """Returns the memory of the device that needs most: lasting bytes as arguments, the rest
    temporary."""
    worst = max(pipeline.stages, key=lambda stage: stage.peak_bytes)
    lasting = sum(one.lasting_bytes for one in pipeline.stages if one.rank == worst.rank)
    return Memory(
        argument_bytes=lasting,
        output_bytes=lasting,
        alias_bytes=lasting,
        temporary_bytes=worst.peak_bytes - lasting,
        peak_bytes=worst.peak_bytes,
    )


def busiest_counts(pipeline: PipelineOutcome) -> Counts:
    """Counts the work of one device in a step, on the rank that computes most."""
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
    """Returns the stage that each stage sends its results, or gradients, to; -1 for none."""
    last = schedule.num_stages - 1
    if forward:
        return tuple(stage + 1 if stage < last else -1 for stage in range(last + 1))
    return tuple(stage - 1 for stage in range(last + 1))


def work_of(
    pipeline: PipelineOutcome,
    spent: Mapping[tuple[int, str], Spent],
    *,
    to_next: Sequence[Move],
    to_previous: Sequence[Move],
) -> PipelineWork:
    """Collects the work of a compiled step, for pricing or drawing.

    Args:
      spent: one execution of each program, by stage and action.
      to_next, to_previous: what each stage sends for one microbatch.
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
