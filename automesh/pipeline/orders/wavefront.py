"""MultiMesh's order: all tasks sorted by wavefront, backward first within one.

The rule is that of nv-legate/multimesh-jax (Apache-2.0), loop_scheduler.cc, written anew. The tasks
of a microbatch are T = [F0 .. F(s-1), B(s-1) .. B0]. Task t of the microbatch at tick k is in
wavefront t + k; ticks come in spans of one per stage, of which the first p start a microbatch.
"""

from __future__ import annotations

from automesh.pipeline.actions import Action, Ranks


def wavefront_order(num_ranks: int, num_microbatches: int, num_stages: int) -> tuple[Action, ...]:
    """All actions in the one order in which MultiMesh dispatches them.

    Example:
      >>> from automesh.pipeline.orders.wavefront import wavefront_order
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
