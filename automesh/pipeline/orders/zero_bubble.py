"""Orders with the backward in two halves, so that weight gradients fill what was a bubble.

Qi et al. 2023, arXiv:2401.10241. One form serves all of them, whatever number of activations,
from p to 2p - 1, a rank may hold. Rank s does some forwards ahead; then an input gradient and a
forward in turns, which lets its weight gradients fall behind by as many; then input gradient,
weight gradient and forward in turns, each as long as there are any. With all three of equal length
rank s begins s units after rank 0, and what it has let fall behind keeps it busy to the end.
"""

from __future__ import annotations

from automesh.pipeline.actions import Action, ActionKind, Ranks


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
