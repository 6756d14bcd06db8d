"""Fourier transforms along a dimension that all devices split."""

from __future__ import annotations

from collections.abc import Mapping

from automesh.cost.terms import Monomial
from automesh.ir.graph import Block, Graph, Operation, Value
from automesh.ir.passes.edits import blocks, like, set_operands


def transform_in_parts(graph: Graph) -> None:
    """Rewrites fft(x), where the last dimension is split, to the steps of the partitioner.

    Each device puts its rows in another order by a product with a matrix of ones and zeros, sends a
    share of them to every other one, transforms what it then has, and adds up the results of all
    devices, which go around in a ring.
    """
    sizes = dict(graph.mesh)
    for block in blocks(graph):
        for operation in [one for one in block.operations if one.name == "fft"]:
            axes = operation.operands[0].axes[-1]
            if axes and not set(axes) & set(operation.operands[0].manual):
                place = block.operations.index(operation)
                block.operations[place : place + 1] = _steps(operation, axes, sizes)


def _steps(transform: Operation, axes: tuple[str, ...], sizes: dict[str, int]) -> list[Operation]:
    whole, result = transform.operands[0], transform.results[0]
    source, last = transform.source, len(whole.shape) - 1
    group = 1
    for axis in axes:
        group *= sizes.get(axis, 1)
    moves = {"axes": axes, "group": group, "exact": True}
    order = Value(shape=(whole.shape[-1],) * 2, dtype=whole.dtype, axes=(axes, axes))
    ordered, shuffled, own = like(whole), like(whole), like(result)
    made = [
        Operation(name="iota", operands=[], results=[order], attributes={"dim": 0}, source=source),
        Operation(
            name="dot_general",
            operands=[whole, order],
            results=[ordered],
            attributes={
                "lhs_batch": (),
                "rhs_batch": (),
                "lhs_contracting": (last,),
                "rhs_contracting": (0,),
            },
            source=source,
        ),
        Operation(
            name="all_to_all",
            operands=[ordered],
            results=[shuffled],
            attributes=dict(moves),
            source=source,
        ),
    ]
    set_operands(transform, [shuffled])
    transform.results = [own]
    own.producer = transform
    total = like(result)
    zeros = Operation(
        name="iota", operands=[], results=[total], attributes={"dim": 0}, source=source
    )
    return [*made, transform, zeros, _ring(total, own, result, axes, moves, source)]


def _ring(
    total: Value,
    own: Value,
    result: Value,
    axes: tuple[str, ...],
    moves: Mapping[str, object],
    source: str,
) -> Operation:
    """Makes the loop in which each device adds up what the others hand on."""
    summed, held, passed, added = (like(own) for _ in range(4))
    body = Block(
        arguments=[summed, held],
        operations=[
            Operation(name="add", operands=[summed, held], results=[added], source=source),
            Operation(
                name="collective_permute",
                operands=[held],
                results=[passed],
                attributes=dict(moves),
                source=source,
            ),
        ],
        returned=[added, passed],
    )
    group = moves["group"]
    return Operation(
        name="while",
        operands=[total, own],
        results=[result, like(own)],
        bodies=[body],
        trips=group if isinstance(group, int) else None,
        trip_formula=(Monomial(coefficient=1.0, powers=tuple((axis, 1) for axis in sorted(axes))),),
        source=source,
    )
