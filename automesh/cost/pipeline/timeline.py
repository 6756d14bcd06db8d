"""Draws a pipeline step in time: what each rank does, waits for and sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from automesh.cost.pipeline.outcome import UPDATE
from automesh.cost.pipeline.step import (
    BUBBLE,
    Move,
    PipelineWork,
    Spent,
    after_schedule,
    stage_costs,
)
from automesh.cost.replay.timeline import Slice, Timeline
from automesh.pipeline.actions import KIND_WORDS, Action
from automesh.pipeline.schedule import Schedule
from automesh.pipeline.simulate import Simulated, Span, Transfer, simulate


def draw_pipeline(schedule: Schedule, work: PipelineWork) -> Timeline:
    """Makes the timeline of one step: a track for each rank, and one for each sending pair.

    It is as long as the step of `price_pipeline`. A wait has no reason (a transfer, a slower stage,
    or the schedule).

    Raises:
      UsageError: the work is of another number of stages.
    """
    simulated = simulate(schedule, stage_costs(work))
    after = after_schedule(schedule, work)
    slices = [
        *_transfers(simulated, work),
        *(
            one
            for rank, spans in enumerate(simulated.spans)
            for one in _rank(rank, spans, work, simulated.makespan_s)
        ),
        *_updates(simulated.makespan_s, after),
    ]
    return Timeline(
        step_s=simulated.makespan_s + max(one.step_s for one in after),
        slices=tuple(sorted(slices, key=lambda slice_: (slice_.start_s, slice_.track))),
    )


def _rank(
    rank: int, spans: Sequence[Span], work: PipelineWork, makespan_s: float
) -> Iterator[Slice]:
    """Lists one rank's actions until the end of the schedule, and the gaps between them."""
    free_s = 0.0
    for span in spans:
        if span.start_s > free_s:
            yield _wait(rank, f"waits to begin {span.action}", free_s, span.start_s)
        free_s = span.end_s
        if span.end_s > span.start_s:
            yield Slice(
                kind="work",
                track=_track(rank),
                name=str(span.action),
                start_s=span.start_s,
                seconds=span.end_s - span.start_s,
                cause=_cause(work.programs.get((span.action.stage, span.action.kind))),
                source=_in_words(span.action),
            )
    if makespan_s > free_s:
        yield _wait(rank, "waits for the other ranks", free_s, makespan_s)


def _wait(rank: int, name: str, start_s: float, end_s: float) -> Slice:
    return Slice(
        kind="wait",
        track=_track(rank),
        name=name,
        start_s=start_s,
        seconds=end_s - start_s,
        cause=BUBBLE,
    )


def _transfers(simulated: Simulated, work: PipelineWork) -> Iterator[Slice]:
    for flight, one in enumerate(simulated.transfers):
        move = _move(one, work)
        yield Slice(
            kind="transfer",
            track=f"{move.cause} {one.from_rank} to {one.to_rank}",
            name=str(one.action),
            start_s=one.start_s,
            seconds=one.end_s - one.start_s,
            cause=move.cause,
            flight=flight,
            source=f"result of {_in_words(one.action)}",
        )


def _move(one: Transfer, work: PipelineWork) -> Move:
    moves = work.to_next if one.action.kind == "F" else work.to_previous
    return moves[one.action.stage]


def _updates(begin_s: float, after: Sequence[Spent]) -> Iterator[Slice]:
    """Draws the end of the step, which all ranks begin together, as norms need all gradients."""
    longest_s = max(one.step_s for one in after)
    for rank, one in enumerate(after):
        if one.step_s:
            yield Slice(
                kind="work",
                track=_track(rank),
                name=UPDATE,
                start_s=begin_s,
                seconds=one.step_s,
                cause=_cause(one),
            )
        if longest_s > one.step_s:
            yield _wait(
                rank, "waits for the other ranks", begin_s + one.step_s, begin_s + longest_s
            )


def _track(rank: int) -> str:
    return f"rank {rank}"


def _cause(spent: Spent | None) -> str:
    return spent.causes[0][0] if spent is not None and spent.causes else ""


def _in_words(action: Action) -> str:
    return f"{KIND_WORDS[action.kind]} of microbatch {action.microbatch} on stage {action.stage}"
