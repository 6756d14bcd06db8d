"""Orders with several stages per rank, dealt round: interleaved 1F1B."""

from __future__ import annotations

from automesh.errors import UsageError
from automesh.pipeline.actions import Action, Ranks


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
