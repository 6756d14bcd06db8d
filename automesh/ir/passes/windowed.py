"""Marks multiplications that the TPU's compiler splits into a ring of steps (windowed einsums).

XLA's partitioner does so instead of gathering an operand or scattering a result (`PartitionDot` and
its helpers in xla/service/spmd/dot_handler.cc) if the gathered axes are exactly those that split
the other operand's free dimensions, or those that the result is summed over. How many devices and
bytes a ring needs is decided in pricing. A gather that the program asks for at another operation
than the product is a gather.
"""

from __future__ import annotations

from automesh.cost.terms import Monomial, Windowed
from automesh.ir.graph import Graph, Operation, Value, element_bytes, times
from automesh.ir.passes.collectives import is_manual
from automesh.ir.passes.edits import blocks, only_user, returned_values

_MOVES = frozenset(("transpose", "reshape"))
# Key in `Operation.attributes` of a product: its `Windowed`s.
WINDOWED = "windowed"
# Key in `Operation.attributes` of a collective that vanishes into a ring: the ring's `whole_bytes`.
IN_RING = "in_ring"
# Likewise: the ring's `intensity`, and the product that it is made of.
INTENSITY = "intensity"
RING_OF = "ring_of"
_TWICE = Monomial(coefficient=2.0)


def mark_windowed(graph: Graph) -> None:
    """Marks products and collectives that may become rings."""
    returned = returned_values(graph)
    for block in blocks(graph):
        for operation in block.operations:
            if operation.name != "dot_general" or operation.attributes["lhs_batch"]:
                continue
            found = _gathered(operation) or _scattered(operation, returned)
            if found is not None:
                operation.attributes[WINDOWED] = (found,)


def _gathered(dot: Operation) -> Windowed | None:
    """Marks a ring that replaces the gather of one operand."""
    left, right = dot.operands[:2]
    contracting = (dot.attributes["lhs_contracting"], dot.attributes["rhs_contracting"])
    for side, operand, other, inside, outside in (
        (1, right, left, contracting[1], contracting[0]),
        (0, left, right, contracting[0], contracting[1]),
    ):
        gather, path = _gather_behind(operand)
        if gather is None or is_manual(gather):
            continue
        axes: tuple[str, ...] = gather.attributes["axes"]
        if not _was_split(dot, side, axes):
            continue
        split = {
            axis
            for place, dimension in enumerate(other.axes)
            if place not in outside
            for axis in dimension
        }
        whole = gather.results[0].bytes
        dots = _dots_behind(gather.results[0])
        # With several users, the partitioner has already made the gather for the first.
        if split != set(axes) or (len(dots) > 1 and dot is dots[0]):
            continue
        if len(dots) == 1:
            intensity = (_intensity(dot, whole),)
            gather.attributes.update({IN_RING: (whole,), INTENSITY: intensity, RING_OF: dot})
        # If the gathered dimension is contracted, each step adds to the whole result.
        adds = _dimension_after(gather, path) in inside
        buffer = dot.results[0].bytes if adds else other.bytes
        return Windowed(
            axes=axes,
            bytes=(times(buffer, _TWICE) if adds else buffer,),
            whole_bytes=(whole,),
            intensity=(_intensity(dot, whole),),
            adds=adds,
            # Accumulators move as many bytes as they would in device memory:
            # cycles of 10 and 29 us for results of 2 and 8 MiB on v5e, whose operands are small.
            buffer_bytes=() if adds else (buffer,),
        )
    return None


def _scattered(dot: Operation, returned: set[Value]) -> Windowed | None:
    """Marks a ring that replaces a reduce-scatter of the result."""
    user = only_user(dot.results[0], returned)
    while user is not None and user.name in _MOVES:
        user = only_user(user.results[0], returned)
    piece = only_user(user.results[0], returned) if user and user.name == "all_reduce" else None
    if user is None or piece is None or piece.name != "all_slice" or is_manual(user):
        return None
    axes: tuple[str, ...] = user.attributes["axes"]
    left, right = dot.operands[:2]
    inside = {a for place in dot.attributes["lhs_contracting"] for a in left.axes[place]}
    if inside != set(axes) or set(piece.attributes["axes"]) != set(axes):
        return None
    if not _was_split(dot, 2, axes):
        return None
    whole = (user.results[0].bytes,)
    intensity = (_intensity(dot, whole[0]),)
    user.attributes.update({IN_RING: whole, INTENSITY: intensity, RING_OF: dot})
    at = next(n for n, one in enumerate(piece.attributes["per_dimension"]) if one)
    free = len(left.shape) - len(dot.attributes["lhs_contracting"])
    again = (right if at < free else left).bytes
    return Windowed(
        axes=axes,
        bytes=(again,),
        whole_bytes=whole,
        intensity=intensity,
        adds=False,
        buffer_bytes=(again,),
    )


def _intensity(dot: Operation, whole_bytes: Monomial) -> Monomial:
    """Returns FLOPs of a product on one device, per byte."""
    left, result = dot.operands[0], dot.results[0]
    pairs = Monomial(coefficient=2.0 / element_bytes(result.dtype))
    found = times(result.bytes, pairs)
    for dimension in dot.attributes["lhs_contracting"]:
        found = times(found, left.dimension(dimension))
    inverse = tuple((axis, -power) for axis, power in whole_bytes.powers)
    return times(found, Monomial(coefficient=1.0 / whole_bytes.coefficient, powers=inverse))


def _was_split(dot: Operation, place: int, axes: tuple[str, ...]) -> bool:
    """Whether a side of the product was declared as split: the product itself then moves it."""
    declared: tuple[tuple[str, ...] | None, ...] = dot.attributes.get("declared", (None,) * 3)
    known = declared[place]
    return known is None or set(axes) <= set(known)


def _gather_behind(value: Value) -> tuple[Operation | None, list[Operation]]:
    """Finds the gather that makes a value, and the operations in between that move its elements."""
    path: list[Operation] = []
    producer = value.producer
    while producer is not None and producer.name in _MOVES:
        path.append(producer)
        producer = producer.operands[0].producer
    is_gather = producer is not None and producer.name == "all_gather"
    return (producer if is_gather else None), path


def _dimension_after(gather: Operation, path: list[Operation]) -> int:
    """Returns the position of the gathered dimension in the product's operand."""
    at = next((n for n, one in enumerate(gather.attributes["per_dimension"]) if one), 0)
    for operation in reversed(path):
        if operation.name == "transpose":
            at = operation.attributes["perm"].index(at)
    return at


def _dots_behind(value: Value) -> list[Operation]:
    found: list[Operation] = []
    for user in value.users:
        if user.name in _MOVES:
            found += _dots_behind(user.results[0])
        elif user.name == "dot_general" and user not in found:
            found.append(user)
    return found
