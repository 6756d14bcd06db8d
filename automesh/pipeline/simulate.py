"""Simulates a step of a pipeline in time, for many costs at once.

The rules * A rank does its actions one after the other, in its order, each as soon as its inputs
are there. * A result for another rank is sent when it is made. A link from one rank to another
carries one
  transfer at a time, in the order in which they were made; both directions are separate links.
  Ranks work on while they send and receive.

So every time is a maximum of sums of durations: no shorter duration makes anything later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from automesh.pipeline.actions import KIND_WORDS, Action, ActionKind, Ranks
from automesh.pipeline.costs import StageCost, spread_costs
from automesh.pipeline.schedule import Schedule

Seconds = NDArray[np.float64]


class Timing:
    """The times when ranks and links are free, and when results arrive.

    Every time is an array with one element per set of costs, in seconds from the first start.

    Args:
      costs: sets of costs, each with one cost per stage.

    Attributes:
      starts, ends: of the last step's actions.
      sent: target, start and end of each transfer of the last step.
      rank_free: the end of each rank's work so far.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[Sequence[StageCost]]) -> None:
        zeros = np.zeros(len(costs))
        self.starts: dict[Action, Seconds] = {}
        self.ends: dict[Action, Seconds] = {}
        self.sent: dict[Action, tuple[int, Seconds, Seconds]] = {}
        self.rank_free = [zeros] * schedule.num_ranks
        self._order = schedule.order
        self._needs = schedule.needs
        self._homes = schedule.homes
        self._link_free: dict[tuple[int, int], Seconds] = {}
        by_stage = [[cost[stage] for cost in costs] for stage in range(schedule.num_stages)]
        self._seconds = {
            (kind, stage): np.array([one.seconds(kind) for one in each])
            for kind in KIND_WORDS
            for stage, each in enumerate(by_stage)
        }
        self._to_next = [np.array([one.to_next_s for one in each]) for each in by_stage]
        self._to_previous = [np.array([one.to_previous_s for one in each]) for each in by_stage]

    def play(self) -> None:
        """Plays one step; another call plays the next one, without a barrier in between."""
        # Times of an earlier step are overwritten before they are read, since an action's needs are
        # of the same step and come before it in this order.
        for rank, action in self._order:
            start = self.rank_free[rank]
            for one in self._needs[action]:
                start = np.maximum(start, self._arrival_s(one, rank))
            end = start + self._seconds[action.kind, action.stage]
            self.starts[action], self.ends[action] = start, end
            self.rank_free[rank] = end
            self._send(rank, action, end)

    def _arrival_s(self, action: Action, rank: int) -> Seconds:
        """Returns when the result of an action is on a rank that needs it."""
        return self.ends[action] if self._homes[action.stage] == rank else self.sent[action][2]

    def _send(self, rank: int, action: Action, made: Seconds) -> None:
        match action.kind:
            case "F":
                target, seconds = action.stage + 1, self._to_next[action.stage]
            case "B" | "I":
                target, seconds = action.stage - 1, self._to_previous[action.stage]
            case "W":
                return
        if 0 <= target < len(self._homes) and self._homes[target] != rank:
            there = self._homes[target]
            start = np.maximum(made, self._link_free.get((rank, there), made))
            self._link_free[rank, there] = start + seconds
            self.sent[action] = (there, start, start + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An action with its start and end; seconds from the first start."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """The transfer of a result of `action` to another rank.

    Attributes:
      start_s: when the link is free for it; not before the action's end.
    """

    action: Action
    from_rank: int
    to_rank: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The activations that a rank holds from a moment until the next `Held`."""

    at_s: float
    activations: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One step of a pipeline in time.

    Attributes:
      spans: the actions of each rank, in order.
      transfers: in the order of their start, without those that take no time.
      held: the activations that each rank holds, over time, from its first action on. An activation
        is held from the start of its `F` to the end of its `B`, or of its `W`; inputs of actions
        that have not begun do not count.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...]
    held: tuple[tuple[Held, ...], ...]

    @property
    def kinds(self) -> tuple[ActionKind, ...]:
        """The kinds of action that occur, in the order F, B, I, W."""
        present = {span.action.kind for spans in self.spans for span in spans}
        return tuple(kind for kind in KIND_WORDS if kind in present)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max(spans[-1].end_s for spans in self.spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of each rank's actions together."""
        return tuple(sum(span.end_s - span.start_s for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they are idle, 0 to 1."""
        available = self.makespan_s * len(self.spans)
        return 1 - sum(self.busy_s) / available if available else 0.0

    @property
    def peak_live(self) -> tuple[int, ...]:
        """The most activations that each rank holds at a time, counted in stages' inputs."""
        return tuple(max(one.activations for one in held) for held in self.held)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes of activations that a device of each rank holds at a time."""
        return tuple(max(one.activation_bytes for one in held) for held in self.held)


def simulate(schedule: Schedule, costs: StageCost | Sequence[StageCost] | None = None) -> Simulated:
    """Plays one step of a pipeline.

    Args:
      costs: one for all stages, or one per stage; None takes the units of the published
        comparisons (see `StageCost`).

    Raises:
      WrongType: something else than costs.
      UsageError: there are not as many costs as stages.

    Example:
      >>> from automesh.pipeline import make_schedule, simulate
      >>> simulated = simulate(make_schedule("1f1b", num_ranks=4, num_microbatches=8))
      >>> simulated.makespan_s, round(simulated.bubble, 4), simulated.peak_live
      (33.0, 0.2727, (4, 3, 2, 1))
    """
    each = spread_costs(StageCost() if costs is None else costs, schedule.num_stages)
    timing = Timing(schedule, [each])
    timing.play()
    spans = {
        action: Span(action=action, start_s=float(start[0]), end_s=float(timing.ends[action][0]))
        for action, start in timing.starts.items()
    }
    return Simulated(
        schedule=schedule,
        spans=tuple(tuple(spans[one] for one in actions) for actions in schedule.ranks),
        transfers=_find_transfers(timing, schedule.homes),
        held=_find_held(schedule.ranks, spans, each),
    )


def find_makespans(schedule: Schedule, costs: Sequence[Sequence[StageCost]]) -> Seconds:
    """Computes `simulate(...).makespan_s` for many sets of costs at once.

    Args:
      costs: sets of costs, each with one cost per stage.

    Returns:
      An array of shape `[len(costs)]`.

    Raises:
      WrongType: something else than costs.
      UsageError: there are not as many costs as stages.

    Example:
      >>> from automesh.pipeline import StageCost, find_makespans, make_schedule
      >>> schedule = make_schedule("gpipe", num_ranks=2, num_microbatches=4)
      >>> slow = StageCost(forward_s=2.0)
      >>> find_makespans(schedule, [[StageCost(), StageCost()], [StageCost(), slow]]).tolist()
      [15.0, 19.0]
    """
    timing = Timing(schedule, [spread_costs(cost, schedule.num_stages) for cost in costs])
    timing.play()
    return np.maximum.reduce(timing.rank_free)


def steady_step_s(
    schedule: Schedule, costs: StageCost | Sequence[StageCost] | None = None
) -> float:
    """Computes seconds per step if each rank begins its next step as soon as it can.

    Steps follow each other like this if nothing synchronizes all ranks between them: no clipping by
    a norm over all stages, no waiting for the loss. It is the mean over as many steps as there are
    ranks, after as many. Zero-bubble H2 is made for this: with actions of equal length its ranks
    never wait.

    Args:
      costs: as in `simulate`.

    Raises:
      WrongType, UsageError: as in `simulate`.

    Example:
      >>> from automesh.pipeline import make_schedule, steady_step_s
      >>> h1, h2 = (make_schedule(f"zb_h{n}", num_ranks=4, num_microbatches=8) for n in (1, 2))
      >>> steady_step_s(h1), steady_step_s(h2)
      (27.0, 24.0)
    """
    each = spread_costs(StageCost() if costs is None else costs, schedule.num_stages)
    timing = Timing(schedule, [each])
    ends: list[float] = []
    for _ in range(2 * schedule.num_ranks):
        timing.play()
        ends.append(float(np.maximum.reduce(timing.rank_free)[0]))
    return (ends[-1] - ends[schedule.num_ranks - 1]) / schedule.num_ranks


def _find_transfers(timing: Timing, homes: Sequence[int]) -> tuple[Transfer, ...]:
    transfers = [
        Transfer(
            action=action,
            from_rank=homes[action.stage],
            to_rank=target,
            start_s=float(start[0]),
            end_s=float(end[0]),
        )
        for action, (target, start, end) in timing.sent.items()
    ]
    return tuple(
        sorted(
            (transfer for transfer in transfers if transfer.end_s > transfer.start_s),
            key=lambda one: (one.start_s, one.end_s),
        )
    )


def _find_held(
    ranks: Ranks, spans: Mapping[Action, Span], costs: Sequence[StageCost]
) -> tuple[tuple[Held, ...], ...]:
    def of(actions: Sequence[Action]) -> tuple[Held, ...]:
        held: list[Held] = []
        count = size = 0
        for action in actions:
            # An input gradient frees nothing: its weight gradient reads the same activation.
            change = {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            if change:
                count += change
                size += change * costs[action.stage].activation_bytes
                span = spans[action]
                at = span.start_s if change > 0 else span.end_s
                held.append(Held(at_s=at, activations=count, activation_bytes=size))
        return tuple(held)

    return tuple(of(actions) for actions in ranks)
