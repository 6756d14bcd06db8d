"""When each rank does what: the recurrence behind the simulator, for many costs at a time.

The rules
* A rank does its actions one after the other, in its order, each as soon as what it needs is there.
* What crosses to another rank is sent when it is made. A link from one rank to another carries one
  transfer at a time, in the order in which they were made; both directions are separate links.
  Ranks work on while they send and receive.

So every time is a maximum of sums of durations: no shorter duration makes anything later.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from automesh.pipeline.actions import KIND_WORDS, Action
from automesh.pipeline.costs import StageCost
from automesh.pipeline.schedule import Schedule

Seconds = NDArray[np.float64]


class Timing:
    """When ranks and links are free, and when results are where they are needed.

    Every time is an array with one element per set of costs, in seconds from the first start.

    Args:
      costs: sets of costs, each with one cost per stage.

    Attributes:
      starts, ends: of the last step's actions.
      sent: of what crossed to another rank in the last step, the target and the transfer's start
        and end.
      rank_free: of each rank the end of what it has done so far.
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
        by_stage = [[one[stage] for one in costs] for stage in range(schedule.num_stages)]
        self._seconds = {
            (kind, stage): np.array([one.seconds(kind) for one in each])
            for kind in KIND_WORDS
            for stage, each in enumerate(by_stage)
        }
        self._to_next = [np.array([one.to_next_s for one in each]) for each in by_stage]
        self._to_previous = [np.array([one.to_previous_s for one in each]) for each in by_stage]

    def play(self) -> None:
        """Plays one step; another call plays the next, for which no rank waits for all others."""
        # What an earlier step left is overwritten before it is read: in this order the needs of
        # an action, which are of its own step, come before it.
        for rank, action in self._order:
            start = self.rank_free[rank]
            for one in self._needs[action]:
                start = np.maximum(start, self._there(one, rank))
            end = start + self._seconds[action.kind, action.stage]
            self.starts[action], self.ends[action] = start, end
            self.rank_free[rank] = end
            self._send(rank, action, end)

    def _there(self, action: Action, rank: int) -> Seconds:
        """When the result of an action is on a rank that needs it."""
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
