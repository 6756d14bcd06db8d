"""Orders with one stage per rank and whole backward passes: GPipe, 1F1B, eager 1F1B."""

from __future__ import annotations

from collections import deque

from automesh.errors import UsageError
from automesh.pipeline.actions import Action, ActionKind, Ranks


def gpipe(num_ranks: int, num_microbatches: int) -> Ranks:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    return tuple(
        _forwards_ahead(stage, num_microbatches, ahead=num_microbatches)
        for stage in range(num_ranks)
    )


def one_forward_one_backward(num_ranks: int, num_microbatches: int) -> Ranks:
    """As many forwards ahead as there are ranks behind (Narayanan et al. 2019, arXiv:1806.03377).

    Rank s holds at most p - s activations.
    """
    return tuple(
        _forwards_ahead(stage, num_microbatches, ahead=num_ranks - 1 - stage)
        for stage in range(num_ranks)
    )


def eager(num_ranks: int, num_microbatches: int) -> Ranks:
    """Twice as many forwards ahead, so that a transfer and the next forward overlap.

    Zhuang et al. 2022, arXiv:2211.05322. Rank s holds at most 2 (p - s) - 1 activations.
    """
    return tuple(
        _forwards_ahead(stage, num_microbatches, ahead=2 * (num_ranks - 1 - stage))
        for stage in range(num_ranks)
    )


def _forwards_ahead(stage: int, num_microbatches: int, *, ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then a forward and a backward in turns, then what is left."""

    def make(kind: ActionKind, microbatch: int) -> Action:
        return Action(kind=kind, microbatch=microbatch, stage=stage)

    ahead = min(ahead, num_microbatches)
    actions = [make("F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        if microbatch + ahead < num_microbatches:
            actions.append(make("F", microbatch + ahead))
        actions.append(make("B", microbatch))
    return tuple(actions)


# DualPipeV: two stages per rank, folded, so that each microbatch runs down and up again.
#
# Rank k has the stages k and 2p - 1 - k. The eight phases are those that DeepSeek describes for
# DualPipeV (github.com/deepseek-ai/DualPipe, MIT; "cut-in-half" by Qi et al.), written anew.


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


# Orders with several stages per rank, dealt round: interleaved 1F1B.


def microbatches_per_round(num_ranks: int, num_microbatches: int) -> int:
    """How many microbatches a rank does on one of its stages before it turns to the next.

    Raises:
      UsageError: the microbatches do not make whole rounds.
    """
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds:
        raise UsageError(
            f"{num_microbatches} microbatches do not make {rounds} equal rounds over "
            f"{num_ranks} ranks",
            hint=f"take a multiple of {num_ranks}",
        )
    return num_microbatches // rounds


def forwards_ahead(rank: int, num_ranks: int, num_microbatches: int, num_stages: int) -> int:
    """Forwards of a rank before its first backward, of all its stages together."""
    per_round = microbatches_per_round(num_ranks, num_microbatches)
    per_rank = num_stages // num_ranks
    ahead = (per_rank - 1) * per_round + 2 * (num_ranks - 1 - rank)
    return min(ahead, num_microbatches * per_rank)


def interleaved(
    num_ranks: int, num_microbatches: int, num_stages: int, *, further_ahead: int = 0
) -> Ranks:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): rank k has k, k + p, k + 2p, ...

    Args:
      further_ahead: forwards more than are needed before the first backward; 1 is the order of
        Kimi K2 (arXiv:2507.20534, section 2.4.3), which leaves room to overlap a stage's
        communication with its neighbour's work.

    Raises:
      UsageError: the microbatches do not make whole rounds.
    """
    per_round = microbatches_per_round(num_ranks, num_microbatches)
    per_rank = num_stages // num_ranks
    steps = num_microbatches * per_rank

    def microbatch_of(step: int) -> int:
        return step // (per_round * per_rank) * per_round + step % per_round

    def actions_of(rank: int) -> tuple[Action, ...]:
        def forward(step: int) -> Action:
            stage = step // per_round % per_rank * num_ranks + rank
            return Action(kind="F", microbatch=microbatch_of(step), stage=stage)

        def backward(step: int) -> Action:
            stage = (per_rank - 1 - step // per_round % per_rank) * num_ranks + rank
            return Action(kind="B", microbatch=microbatch_of(step), stage=stage)

        ahead = forwards_ahead(rank, num_ranks, num_microbatches, num_stages) + further_ahead
        ahead = min(ahead, steps)
        actions = [forward(step) for step in range(ahead)]
        for step in range(steps):
            if step + ahead < steps:
                actions.append(forward(step + ahead))
            actions.append(backward(step))
        return tuple(actions)

    return tuple(actions_of(rank) for rank in range(num_ranks))


# MultiMesh's order: all tasks sorted by wavefront, backward first within one.
#
# The rule is that of nv-legate/multimesh-jax (Apache-2.0), loop_scheduler.cc, written anew. The
# tasks of a microbatch are T = [F0 .. F(s-1), B(s-1) .. B0]. Task t of the microbatch at tick k is
# in wavefront t + k; ticks come in spans of one per stage, of which the first p start a
# microbatch.


def wavefront_order(num_ranks: int, num_microbatches: int, num_stages: int) -> tuple[Action, ...]:
    """All actions in the one order in which MultiMesh dispatches them.

    Example:
      >>> from automesh.pipeline.orders import wavefront_order
      >>> " ".join(str(action) for action in wavefront_order(2, 2, 2))
      'F0@0 F0@1 F1@0 B0@1 F1@1 B0@0 B1@1 B1@0'
    """
    placed: list[tuple[int, int, Action]] = []
    for microbatch in range(num_microbatches):
        tick = microbatch // num_ranks * num_stages + microbatch % num_ranks
        for stage in range(num_stages):
            last = 2 * num_stages - 1
            forward = Action(kind="F", microbatch=microbatch, stage=stage)
            backward = Action(kind="B", microbatch=microbatch, stage=stage)
            placed.append((tick + stage, -stage, forward))
            placed.append((tick + last - stage, stage - last, backward))
    return tuple(action for _, _, action in sorted(placed, key=lambda one: one[:2]))


def wavefront(num_ranks: int, num_microbatches: int, num_stages: int) -> Ranks:
    """Each rank's part of `wavefront_order`; stage s is on rank s mod p."""
    order = wavefront_order(num_ranks, num_microbatches, num_stages)
    return tuple(
        tuple(action for action in order if action.stage % num_ranks == rank)
        for rank in range(num_ranks)
    )


# Orders with the backward in two halves, so that weight gradients fill what was a bubble.
#
# Qi et al. 2023, arXiv:2401.10241. One form serves all of them, whatever number of activations,
# from p to 2p - 1, a rank may hold. Rank s does some forwards ahead; then an input gradient and a
# forward in turns, which lets its weight gradients fall behind by as many; then input gradient,
# weight gradient and forward in turns, each as long as there are any. With all three of equal
# length rank s begins s units after rank 0, and what it has let fall behind keeps it busy to the
# end.


def zero_bubble_h1(num_ranks: int, num_microbatches: int) -> Ranks:
    """No more activations on any rank than 1F1B has on its first: p."""
    return _zero_bubble(num_ranks, num_microbatches, most_live=num_ranks)


def zero_bubble_h2(num_ranks: int, num_microbatches: int) -> Ranks:
    """Up to 2p - 1 activations on every rank, and no rank waits once it has begun."""
    most_live = min(2 * num_ranks - 1, num_microbatches)
    return _zero_bubble(num_ranks, num_microbatches, most_live=most_live)


def _zero_bubble(num_ranks: int, num_microbatches: int, *, most_live: int) -> Ranks:
    def actions_of(stage: int) -> tuple[Action, ...]:
        behind = num_ranks - 1 - stage
        ahead = 1 + behind + min(most_live - num_ranks, behind)
        return _rotate(stage, num_microbatches, ahead=ahead, in_turns=most_live - ahead)

    return tuple(actions_of(stage) for stage in range(num_ranks))


def _rotate(stage: int, num_microbatches: int, *, ahead: int, in_turns: int) -> tuple[Action, ...]:
    actions: list[Action] = []
    done: dict[ActionKind, int] = {"F": 0, "I": 0, "W": 0}

    def do(kind: ActionKind) -> None:
        if done[kind] < num_microbatches:
            actions.append(Action(kind=kind, microbatch=done[kind], stage=stage))
            done[kind] += 1

    for _ in range(ahead):
        do("F")
    for _ in range(in_turns):
        do("I")
        do("F")
    while done["W"] < num_microbatches:
        do("I")
        do("W")
        do("F")
    return tuple(actions)
