"""Time and memory of a step that is a pipeline: its programs, its transfers and its schedule.

Terms or replays price each program alone; the simulator schedules them in time. A rank does nothing
else during an action's program, and a program takes the same time in every microbatch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.outcomes import Causes, Estimated, ReplayOutcome, largest_first
from automesh.pipeline.actions import Action, ActionKind
from automesh.pipeline.costs import StageCost
from automesh.pipeline.schedule import Schedule
from automesh.pipeline.simulate import find_makespans

BUBBLE = "bubble"
_Programs = Mapping[tuple[int, ActionKind], "Spent"]
# Costs of a program, and of a transfer.
_Views = tuple[Callable[["Spent"], float], Callable[["Move"], float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """The cost of one execution of a program; the fields are those of `Estimated`."""

    step_s: float
    lower_s: float
    upper_s: float
    bound_s: float = 0.0
    causes: Causes = ()


NOTHING = Spent(step_s=0.0, lower_s=0.0, upper_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """The data that a stage sends to a neighbour for one microbatch.

    Attributes:
      cause: the wires and the axis: `dcn pp`.
    """

    seconds: float
    cause: str


STAYS = Move(seconds=0.0, cause="")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one device of a stage.

    Attributes:
      lasting: from step to step and microbatch to microbatch: parameters, the optimizer's state,
        the sums of gradients.
      activation: of one microbatch, from the start of its `F` to the end of its `B` or `W`.
      working: what the program that needs most has in addition to both.
      finishing: what the program after the schedule has in addition to `lasting`.
    """

    lasting: int
    activation: int
    working: int
    finishing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWork:
    """One plan's stages.

    Attributes:
      programs: by stage and kind of action; a missing program takes no time, such as the forward
        pass of a last stage that is part of its backward pass.
      to_next, to_previous: what each stage sends for one microbatch.
      finish: what each stage does after the schedule: the gradients' norm, the optimizer.
      memory: of each stage.
    """

    programs: _Programs
    to_next: Sequence[Move]
    to_previous: Sequence[Move]
    memory: Sequence[StageMemory]
    finish: Sequence[Spent] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """The cost of a step.

    Attributes:
      step_s: the simulated makespan, plus the slowest rank's work after it.
      bracket_s: the same with the lowest and with the highest seconds of every program.
      bound_s: the same with the proven lower limit of every program, and no transfers.
      causes: (cause, seconds) that sum to `step_s`, largest first: those of the busiest rank's
        programs; `dcn pp` or the like for what transfers add; `bubble` for the other waits of that
        rank, due to the schedule and the imbalance of the stages.
      stage_bytes: memory of a device of each stage, including all else that its rank holds.
      bubble: share of the ranks' time in which they are idle, 0 to 1, including transfers.
    """

    step_s: float
    bracket_s: tuple[float, float]
    bound_s: float
    causes: Causes
    stage_bytes: tuple[int, ...]
    bubble: float

    @property
    def memory_bytes(self) -> int:
        """Bytes of the worst device."""
        return max(self.stage_bytes)


def spent_of(priced: Estimated | ReplayOutcome) -> Spent:
    """Takes the cost of a program from its estimate or its replay."""
    return Spent(
        step_s=priced.step_s,
        lower_s=priced.bracket_s[0],
        upper_s=priced.bracket_s[1],
        bound_s=priced.bound_s if isinstance(priced, Estimated) else 0.0,
        causes=priced.causes,
    )


def price_pipeline(schedule: Schedule, work: PipelineWork) -> PipelineCost:
    """Prices one plan; see `price_pipelines`."""
    return price_pipelines(schedule, [work])[0]


def price_pipelines(schedule: Schedule, works: Sequence[PipelineWork]) -> list[PipelineCost]:
    """Prices plans that run the same schedule, all in one simulation.

    Args:
      works: each with as many stages as the schedule.

    Raises:
      UsageError: of another number of stages.

    Example:
      >>> from automesh.pipeline import make_schedule
      >>> each = Spent(step_s=1.0, lower_s=1.0, upper_s=1.0, causes=(("compute", 1.0),))
      >>> work = PipelineWork(
      ...     programs={(stage, kind): each for stage in range(2) for kind in ("F", "B")},
      ...     to_next=[STAYS] * 2,
      ...     to_previous=[STAYS] * 2,
      ...     memory=[StageMemory(lasting=100, activation=10, working=1)] * 2,
      ... )
      >>> schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
      >>> found = price_pipeline(schedule, work)
      >>> found.step_s, found.causes, found.stage_bytes
      (10.0, (('compute', 8.0), ('bubble', 2.0)), (121, 111))
    """
    views: tuple[_Views, ...] = (
        (lambda one: one.step_s, lambda move: move.seconds),
        (lambda one: one.step_s, lambda _: 0.0),
        (lambda one: one.lower_s, lambda _: 0.0),
        (lambda one: one.upper_s, lambda move: move.seconds),
        (lambda one: one.bound_s, lambda _: 0.0),
    )
    stages = range(schedule.num_stages)
    sets = [
        [_stage_cost(work, stage, view) for stage in stages] for work in works for view in views
    ]
    makespans = find_makespans(schedule, sets).reshape(len(works), len(views)).tolist()
    facts = _Facts.of(schedule)
    return [_cost(facts, work, spans) for work, spans in zip(works, makespans, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """The facts of a schedule that do not depend on costs.

    Attributes:
      homes: rank of each stage.
      times: how often each program is run.
      held: per rank [moments, stages]: activations of each stage that it holds at each moment.
    """

    homes: tuple[int, ...]
    times: Mapping[tuple[int, ActionKind], int]
    held: tuple[NDArray[np.int64], ...]

    @staticmethod
    def of(schedule: Schedule) -> _Facts:
        every = (action for actions in schedule.ranks for action in actions)
        return _Facts(
            homes=schedule.homes,
            times=Counter((action.stage, action.kind) for action in every),
            held=tuple(_held(actions, schedule.num_stages) for actions in schedule.ranks),
        )

    @property
    def num_ranks(self) -> int:
        return len(self.held)

    def on(self, rank: int) -> list[int]:
        """Lists the stages of a rank."""
        return [stage for stage, home in enumerate(self.homes) if home == rank]


def _held(actions: Sequence[Action], num_stages: int) -> NDArray[np.int64]:
    changes = np.zeros((len(actions), num_stages), np.int64)
    for place, action in enumerate(actions):
        # An input gradient frees nothing: its weight gradient reads the same activation.
        if action.kind == "F":
            changes[place, action.stage] += 1
        elif action.kind != "I" and place + 1 < len(actions):
            changes[place + 1, action.stage] -= 1
    return np.unique(np.cumsum(changes, axis=0), axis=0)


def _stage_cost(work: PipelineWork, stage: int, view: _Views) -> StageCost:
    of_program, of_move = view

    def seconds(kind: ActionKind) -> float:
        return of_program(work.programs.get((stage, kind), NOTHING))

    return StageCost(
        forward_s=seconds("F"),
        backward_s=seconds("B"),
        input_gradient_s=seconds("I"),
        weight_gradient_s=seconds("W"),
        to_next_s=of_move(work.to_next[stage]),
        to_previous_s=of_move(work.to_previous[stage]),
    )


def stage_costs(work: PipelineWork) -> list[StageCost]:
    """Returns the central costs of each stage, for the simulator."""
    view = (lambda one: one.step_s, lambda move: move.seconds)
    return [_stage_cost(work, stage, view) for stage in range(len(work.memory))]


def after_schedule(schedule: Schedule, work: PipelineWork) -> list[Spent]:
    """Lists what each rank does after the schedule, one stage after the other."""
    facts = _Facts.of(schedule)
    return [_finish(facts, work, rank) for rank in range(facts.num_ranks)]


def _cost(facts: _Facts, work: PipelineWork, makespans: Sequence[float]) -> PipelineCost:
    whole, unmoved, lower, upper, bound = makespans
    busy = [
        sum(times * one.step_s for times, one in _runs(facts, work, rank))
        for rank in range(facts.num_ranks)
    ]
    busiest = max(range(facts.num_ranks), key=lambda rank: busy[rank])
    after = [_finish(facts, work, rank) for rank in range(facts.num_ranks)]
    last = max(after, key=lambda one: one.step_s)
    seconds = defaultdict[str, float](float, last.causes)
    for times, one in _runs(facts, work, busiest):
        for cause, spent in one.causes:
            seconds[cause] += times * spent
    slowest = max((*work.to_next, *work.to_previous), key=lambda move: move.seconds)
    seconds[slowest.cause] += max(whole - unmoved, 0.0)
    seconds[BUBBLE] += max(unmoved - busy[busiest], 0.0)
    step_s = whole + last.step_s
    return PipelineCost(
        step_s=step_s,
        bracket_s=(
            min(lower + max(one.lower_s for one in after), step_s),
            max(upper + max(one.upper_s for one in after), step_s),
        ),
        bound_s=bound + max(one.bound_s for one in after),
        causes=largest_first(seconds.items()),
        stage_bytes=_stage_bytes(facts, work),
        bubble=1.0 - sum(busy) / (whole * len(busy)) if whole else 0.0,
    )


def _runs(facts: _Facts, work: PipelineWork, rank: int) -> list[tuple[int, Spent]]:
    """Lists a rank's programs: how often each is run, and its cost."""
    return [
        (times, work.programs.get(program, NOTHING))
        for program, times in facts.times.items()
        if facts.homes[program[0]] == rank
    ]


def _finish(facts: _Facts, work: PipelineWork, rank: int) -> Spent:
    """Lists what a rank does after the schedule, one stage after the other."""
    parts = [work.finish[stage] for stage in facts.on(rank)] if work.finish else []
    seconds = defaultdict[str, float](float)
    for one in parts:
        for cause, spent in one.causes:
            seconds[cause] += spent
    return Spent(
        step_s=sum(part.step_s for part in parts),
        lower_s=sum(part.lower_s for part in parts),
        upper_s=sum(part.upper_s for part in parts),
        bound_s=sum(part.bound_s for part in parts),
        causes=largest_first(seconds.items()),
    )


def _stage_bytes(facts: _Facts, work: PipelineWork) -> tuple[int, ...]:
    activations = np.array([one.activation for one in work.memory], np.int64)
    found: list[int] = []
    for stage, rank in enumerate(facts.homes):
        lasting = sum(work.memory[one].lasting for one in facts.on(rank))
        held = int((facts.held[rank] @ activations).max())
        own = work.memory[stage]
        found.append(lasting + max(held + own.working, own.finishing))
    return tuple(found)
