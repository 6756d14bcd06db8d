"""What a partitioned program does that costs memory or time and that nobody asked for (no jax).

Each function looks at one operation of a graph after the rewrites of a platform's compiler, and
names what it finds by rule, array, line, bytes and axes. `report.findings` has the words.
"""

from __future__ import annotations

from collections.abc import Iterator

from automesh.cost.terms import Finding, Sum
from automesh.ir.graph import Operation, Value
from automesh.ir.terms.collectives import nearby_source

# Less than this in the whole array is not worth a word.
_LEAST_BYTES = 1 << 20
FULL_REMATERIALIZATION = "full-rematerialization"
LAYER_SPLIT_STACK = "layer-split-stack"


def findings_in(operation: Operation, count: Sum) -> Iterator[Finding]:
    """What is found in one operation, its bodies left out.

    Args:
      count: executions in a step.
    """
    if operation.name != "all_gather" or operation.attributes.get("manual"):
        return
    whole = operation.results[0]
    if whole.is_constant or whole.global_bytes < _LEAST_BYTES:
        return
    rule = _rule_of(operation, whole)
    if rule:
        yield Finding(
            rule=rule,
            array=words(whole),
            bytes=(whole.bytes,),
            axes=operation.attributes["axes"],
            count=count,
            source=nearby_source(operation),
        )


def _rule_of(gather: Operation, whole: Value) -> str:
    users = set(whole.users)
    if users and all(user.name == "all_slice" for user in users):
        return FULL_REMATERIALIZATION
    gathered = [d for d, axes in enumerate(gather.attributes["per_dimension"]) if axes]
    readers = _slices_of(whole)
    if readers and all(_cuts(reader, gathered) for reader in readers):
        return LAYER_SPLIT_STACK
    return ""


def _slices_of(whole: Value) -> list[Operation]:
    """What reads a gathered array, inside the loops that it is carried into too; empty if anything
    else than a dynamic slice does."""
    found: list[Operation] = []
    for user in set(whole.users):
        if user.name == "while":
            number = user.operands.index(whole)
            body = user.bodies[0]
            if body.returned[number] is not body.arguments[number]:
                return []
            inner = _slices_of(body.arguments[number])
            if not inner:
                return []
            found += inner
        elif user.name == "dynamic_slice" and user.operands[0] is whole:
            found.append(user)
        else:
            return []
    return found


def _cuts(reader: Operation, dimensions: list[int]) -> bool:
    """Whether a slice takes a single element along one of the dimensions."""
    return any(reader.attributes["sizes"][d] == 1 for d in dimensions)


def words(value: Value) -> str:
    """`f32[64,256]`: the whole array."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
