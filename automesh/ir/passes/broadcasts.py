"""Gathers that compilers move in front of a broadcast, so that less travels.

Source: `AllGatherBroadcastReorder` (all_gather_broadcast_reorder.cc in xla), which the GPU's
compiler runs; programs of libtpu 0.0.52 for v5e show the same.
"""

from __future__ import annotations

from automesh.ir.graph import Graph, Operation, Value
from automesh.ir.passes.collectives import is_manual
from automesh.ir.passes.edits import Changes, blocks, take_result

_Split = tuple[tuple[str, ...], ...]


def gather_before_broadcasts(graph: Graph) -> None:
    """Rewrites all_gather(broadcast(x)) to broadcast(all_gather(x)), along dimensions that x has
    itself.

    For example, the gradient of a mean over several rows of a table is one row, repeated: only that
    row is gathered.
    """
    for block in blocks(graph):
        changes = Changes(block)
        for gather in list(block.operations):
            if gather.name != "all_gather" or is_manual(gather):
                continue
            repeat = gather.operands[0].producer
            if repeat is None or repeat.name != "broadcast_in_dim" or repeat not in changes:
                continue
            per_dimension = _of_operand(gather.attributes.get("per_dimension", ()), repeat)
            if per_dimension:
                changes.put(gather, _reordered(gather, repeat, per_dimension))
        changes.apply()


def _of_operand(gathered: _Split, repeat: Operation) -> _Split:
    """Returns what is gathered along each dimension of the broadcast's operand.

    Empty if the operand is not smaller than the result, or if something is gathered along a
    dimension that the operand does not have in full.
    """
    small, large = repeat.operands[0], repeat.results[0]
    places: tuple[int, ...] = repeat.attributes["dims"]
    whole = {place for own, place in enumerate(places) if small.shape[own] == large.shape[place]}
    if any(axes and place not in whole for place, axes in enumerate(gathered)):
        return ()
    return tuple(gathered[place] for place in places) if large.shape != small.shape else ()


def _reordered(gather: Operation, repeat: Operation, per_dimension: _Split) -> list[Operation]:
    small, result = repeat.operands[0], gather.results[0]
    left = tuple(
        axes[: len(axes) - len(gone)] for axes, gone in zip(small.axes, per_dimension, strict=True)
    )
    whole = Value(shape=small.shape, dtype=small.dtype, axes=left, manual=small.manual)
    first = Operation(
        name="all_gather",
        operands=[small],
        results=[whole],
        attributes={**gather.attributes, "per_dimension": per_dimension},
        source=gather.source,
    )
    second = Operation(
        name=repeat.name,
        operands=[whole],
        results=[],
        attributes=dict(repeat.attributes),
        source=repeat.source,
    )
    take_result(second, result)
    gather.operands[0].users.remove(gather)
    gather.operands, gather.results = [], []
    return [first, second]
