"""DualPipeV: two stages per rank, folded, so that each microbatch runs down and up again.

Rank k has the stages k and 2p - 1 - k. The eight phases are those that DeepSeek describes for
DualPipeV (github.com/deepseek-ai/DualPipe, MIT; "cut-in-half" by Qi et al.), written anew.
"""

from __future__ import annotations

from collections import deque

from automesh.pipeline.actions import Action, ActionKind, Ranks


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Ranks:
    """The order for at least 2p microbatches; every rank holds at most 2p + 1 activations."""
    return tuple(_Rank(rank, num_ranks).play(num_microbatches) for rank in range(num_ranks))


class _Rank:
    """One rank's order while it is being written."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._next: dict[tuple[ActionKind, int], int] = {}
        self._postponed: deque[Action] = deque()
        self._actions: list[Action] = []

    def play(self, num_microbatches: int) -> tuple[Action, ...]:
        behind = self._num_ranks - 1 - self._rank
        to_turn = self._rank + 1
        for _ in range(2 * behind):
            self._forward(0)
        for _ in range(to_turn):
            self._forward(0)
            self._forward(1)
        for _ in range(behind):
            self._backward(1, split=True)
            self._weights()
            self._forward(1)
        for _ in range(num_microbatches - 2 * self._num_ranks + to_turn):
            self._forward(0)
            self._backward(1)
            self._forward(1)
            self._backward(0)
        for _ in range(behind):
            self._backward(1)
            self._forward(1)
            self._backward(0)
        self._last_backwards(behind, to_turn)
        return tuple(self._actions)

    def _last_backwards(self, behind: int, to_turn: int) -> None:
        # From its middle on, this phase postpones weight gradients, for the phases after it.
        for turn in range(2 * to_turn):
            self._backward(1 - turn % 2, split=turn >= to_turn)
        for _ in range(behind):
            self._weights()
            self._backward(0, split=True)
        while self._postponed:
            self._weights()

    def _forward(self, half: int) -> None:
        self._actions.append(self._make("F", half))

    def _backward(self, half: int, *, split: bool = False) -> None:
        action = self._make("I" if split else "B", half, counted_as="B")
        self._actions.append(action)
        if split:
            self._postponed.append(
                Action(kind="W", microbatch=action.microbatch, stage=action.stage)
            )

    def _weights(self) -> None:
        self._actions.append(self._postponed.popleft())

    def _make(self, kind: ActionKind, half: int, counted_as: ActionKind | None = None) -> Action:
        counter = (counted_as or kind, half)
        microbatch = self._next.get(counter, 0)
        self._next[counter] = microbatch + 1
        return Action(kind=kind, microbatch=microbatch, stage=self._stages[half])
