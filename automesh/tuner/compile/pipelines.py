"""The step time of a pipeline from its compiled programs: predicted from their work, or
replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from automesh.cost.pipeline.outcome import UPDATE, neighbours, schedule_of, work_of
from automesh.cost.pipeline.step import (
    STAYS,
    Move,
    PipelineCost,
    PipelineWork,
    Spent,
    price_pipeline,
    spent_of,
    stage_costs,
)
from automesh.cost.pipeline.timeline import draw_pipeline
from automesh.cost.pipeline.transfers import moves
from automesh.cost.replay.timeline import Timeline
from automesh.cost.roofline import predict
from automesh.hardware import Chip
from automesh.hardware.model import HardwareModel
from automesh.mesh.axes import Plan
from automesh.outcomes import Compiled, PipelineOutcome, ReplayOutcome, StageProgram
from automesh.pipeline.simulate import Simulated, simulate


def predict_pipeline(compiled: Compiled, pipeline: PipelineOutcome, chip: Chip) -> Compiled:
    """Adds a time predicted from the work of its programs; see `automesh.cost.roofline`."""
    cost = price_pipeline(schedule_of(pipeline), _predicted_work(pipeline, chip))
    return replace(
        compiled, step_s=cost.step_s, pipeline=replace(pipeline, bubble=max(cost.bubble, 0.0))
    )


def predicted_timeline(pipeline: PipelineOutcome, chip: Chip) -> tuple[Timeline, Simulated]:
    """Returns the timeline of each rank, predicted from the work of the programs, for a pipeline
    without replay.

    Returns:
      The timeline of a step, and its simulation, which also has the memory of each rank.
    """
    schedule, work = schedule_of(pipeline), _predicted_work(pipeline, chip)
    return draw_pipeline(schedule, work), simulate(schedule, stage_costs(work))


def _predicted_work(pipeline: PipelineOutcome, chip: Chip) -> PipelineWork:
    schedule = schedule_of(pipeline)

    def sent(payload_bytes: int, target: int, stage: int) -> Move:
        if target < 0 or schedule.homes[target] == schedule.homes[stage]:
            return STAYS
        seconds = chip.link_latency_s + payload_bytes / chip.link_bytes_per_s
        return Move(seconds=seconds, cause=f"network {pipeline.axis}")

    on, back = (neighbours(schedule, forward=forward) for forward in (True, False))
    return work_of(
        pipeline,
        {
            (program.stage, program.action): _predicted(program, chip)
            for program in pipeline.programs
        },
        to_next=[
            sent(stage.next_bytes, on[place], place) for place, stage in enumerate(pipeline.stages)
        ],
        to_previous=[
            sent(stage.previous_bytes, back[place], place)
            for place, stage in enumerate(pipeline.stages)
        ],
    )


def _predicted(one: StageProgram, chip: Chip) -> Spent:
    time = predict(one.counts, chip)
    hidden = min(time.compute_s, time.memory_s)
    return Spent(
        step_s=time.step_s,
        lower_s=max(time.compute_s, time.memory_s),
        upper_s=time.step_s + hidden,
        causes=time.causes,
    )


def replay_pipeline(
    plan: Plan,
    compiled: Compiled,
    pipeline: PipelineOutcome,
    play: Callable[[StageProgram], ReplayOutcome],
    *,
    hardware: HardwareModel,
) -> tuple[Compiled, Timeline]:
    """Adds the step time from the replays of its programs; returns it with the timeline.

    Args:
      play: replays one program on its submesh.
    """
    played = {(one.stage, one.action): play(one) for one in pipeline.programs}
    schedule = schedule_of(pipeline)

    def over(payload_bytes: Sequence[int], *, forward: bool) -> list[Move]:
        return moves(
            payload_bytes,
            neighbours(schedule, forward=forward),
            schedule.homes,
            axes=plan.axes,
            axis=pipeline.axis,
            hardware=hardware,
        )

    to_next = over([stage.next_bytes for stage in pipeline.stages], forward=True)
    to_previous = over([stage.previous_bytes for stage in pipeline.stages], forward=False)
    work = work_of(
        pipeline,
        {program: spent_of(one) for program, one in played.items()},
        to_next=to_next,
        to_previous=to_previous,
    )
    cost = price_pipeline(schedule, work)
    times = Counter((one.stage, str(one.kind)) for _, one in schedule.order)
    together = _busiest_replay(cost, played, times, schedule.homes, pipeline, hardware.fabric.chip)
    sends = [
        (one.cause, schedule.num_microbatches * one.seconds)
        for one in (*to_next, *to_previous)
        if one.seconds
    ]
    found = replace(
        compiled,
        step_s=cost.step_s,
        # The transfers of all ranks, which include every chain of transfers that a step waits for.
        replay=replace(together, communication_s=_sum_by_name([*together.communication_s, *sends])),
        pipeline=replace(pipeline, bubble=max(cost.bubble, 0.0)),
    )
    return found, draw_pipeline(schedule, work)


def _busiest_replay(
    cost: PipelineCost,
    played: Mapping[tuple[int, str], ReplayOutcome],
    times: Mapping[tuple[int, str], int],
    homes: Sequence[int],
    pipeline: PipelineOutcome,
    chip: Chip,
) -> ReplayOutcome:
    """Returns one replay for all programs: that of the busiest rank, which also has the causes."""
    runs = {program: 1 if program[1] == UPDATE else times[program] for program in played}
    busy = Counter[int]()
    for program, one in played.items():
        busy[homes[program[0]]] += round(1e12 * runs[program] * one.step_s)
    rank = max(busy, key=lambda one: busy[one])
    mine = [program for program in played if homes[program[0]] == rank]
    flops = sum(runs[one.stage, one.action] * one.counts.flops for one in pipeline.programs)
    possible = chip.flops_per_s * cost.step_s * (max(homes) + 1)
    return ReplayOutcome(
        step_s=cost.step_s,
        bracket_s=cost.bracket_s,
        causes=cost.causes,
        communication_s=_sum_by_name(
            [(name, runs[one] * s) for one in mine for name, s in played[one].communication_s]
        ),
        busy_s=_sum_by_name(
            [(name, runs[one] * s) for one in mine for name, s in played[one].busy_s]
        ),
        mfu=flops / possible if possible else 0.0,
        uncounted=tuple(dict.fromkeys(what for one in played.values() for what in one.uncounted)),
    )


def _sum_by_name(parts: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Sums seconds by name; the largest first."""
    total: dict[str, float] = {}
    for name, seconds in parts:
        total[name] = total.get(name, 0.0) + seconds
    return tuple(sorted(total.items(), key=lambda item: (-item[1], item[0])))
