"""How often a kernel computes an element of a value that has no buffer.

A kernel computes such a value where it reads it. What elementwise operations read at one place is
computed once for all of them; an operation that reads elsewhere than it writes (a slice, a pad, a
transpose) asks for another element. So two branches of slices and pads that meet again and again,
as in an associative scan, double the work at every level, and a compiler stores what it would
compute too often. What branches, as a pad does at its edges, is not computed twice at all.

Source: `FusionNodeIndexingEvaluation` (xla/service/fusion_node_indexing_evaluation.cc), which the
fusion of the CPU compiler asks with a limit of 15.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set

from automesh.ir.graph import Block, Operation, Value
from automesh.ir.op_kinds import SLICES, VIEWS, VIRTUAL

# Read other elements of their operands than those of their result that they compute.
_MOVES = SLICES | VIEWS | {
    "broadcast_in_dim", "concatenate", "dynamic_broadcast_in_dim", "pad", "reverse", "transpose",
}  # fmt: skip
_BRANCHES = frozenset(("concatenate", "pad"))
# Kernel (the operation that stores its result) -> operations at whose places it reads a value.
_Places = dict[Operation, set[Operation]]


def computed_too_often(block: Block, stored: Set[Value], most: int) -> set[Value]:
    """Finds values of one block, without those of its loops, that need a buffer.

    Args:
      stored: what has a buffer anyway.
      most: how often a kernel may compute an element of a value.
    """
    found: set[Value] = set()
    read_at: dict[Value, _Places] = defaultdict(lambda: defaultdict(set))
    times: dict[tuple[Operation, Operation], int] = {}
    for operation in reversed(block.operations):
        places: _Places = {operation: {operation}}
        times[operation, operation] = 1
        if operation.name in VIRTUAL and stored.isdisjoint(operation.results):
            computed = read_at[operation.results[0]]
            counts = {
                kernel: sum(times[kernel, place] for place in at) for kernel, at in computed.items()
            }
            if _is_too_often(operation, max(counts.values(), default=0), most):
                found.add(operation.results[0])
            elif operation.name in _MOVES:
                places = {kernel: {operation} for kernel in computed}
                times.update({(kernel, operation): count for kernel, count in counts.items()})
            else:
                places = computed
        for operand in operation.operands:
            for kernel, at in places.items():
                read_at[operand][kernel] |= at
    return found


def _is_too_often(operation: Operation, count: int, most: int) -> bool:
    if operation.name in _BRANCHES:
        return count > 1 or len(set(operation.results[0].users)) > 1
    return count > most and "broadcast" not in operation.name
