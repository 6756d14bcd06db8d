"""Orders with one stage per rank and whole backward passes: GPipe, 1F1B, eager 1F1B."""

from __future__ import annotations

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
