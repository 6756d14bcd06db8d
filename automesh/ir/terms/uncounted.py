"""What has no price: it is named, never taken as free."""

from __future__ import annotations

from automesh.cost.terms import Uncounted
from automesh.ir.graph import Operation
from automesh.ir.kernel_cost import cost_of

# Custom calls that multiply no matrices and move only their operands and results.
_PLAIN_TARGETS = frozenset(
    (
        "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer", "TopK",
        "PartialReduce", "ApproxTopK", "annotate_device_placement", "xla.sdy.FuncResultSharding",
        "LayoutConstraint", "CreateBuffer", "Pin", "Unpin", "mhlo.topk", "topk",
    )
)  # fmt: skip
_OTHER_MATH = frozenset(("fft", "triangular_solve", "cholesky"))
_HOST = frozenset(("send", "recv", "infeed", "outfeed"))


def uncounted_in(operation: Operation) -> list[Uncounted]:
    """What of one operation, its bodies left out, the terms do not contain."""
    name, source = operation.name, operation.source
    found: list[Uncounted] = []
    if name == "while" and operation.trips is None:
        place = source or operation.attributes.get("condition_source", "")
        found.append(
            Uncounted(
                what="loop of unknown length",
                why="how often it runs depends on the data: its body is counted once",
                source=place,
            )
        )
    elif name == "custom_call":
        found += _custom_call(operation)
    elif name in _OTHER_MATH:
        found.append(
            Uncounted(what=f"FLOPs of {name}", why="only its bytes are counted", source=source)
        )
    elif name in _HOST:
        found.append(
            Uncounted(
                what=name,
                why="the way to the host or to another program has no price",
                source=source,
            )
        )
    if operation.attributes.get("exact") is False:
        found.append(
            Uncounted(
                what=f"{name} over groups that are no product of mesh axes",
                why="it is priced as if its members lay along these axes",
                source=source,
            )
        )
    return found


def _custom_call(operation: Operation) -> list[Uncounted]:
    target = operation.attributes.get("target", "")
    placement = operation.attributes.get("placement", "")
    if placement:
        return [
            Uncounted(
                what=f"transfer to {placement} memory",
                why="the link between host and device has no price",
                source=operation.source,
            )
        ]
    if target in _PLAIN_TARGETS or "flops" in cost_of(operation):
        return []
    return [
        Uncounted(
            what=f"custom call {target}",
            why="it states no cost: only its operands and results are counted as traffic",
            source=operation.source,
        )
    ]
