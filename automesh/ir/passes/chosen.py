"""Scatters of one element for each row, which compilers choose by comparing instead."""

from __future__ import annotations

from automesh.ir.graph import Graph, Operation, Value
from automesh.ir.passes.edits import Changes, blocks, like, set_operands, take_result


def choose_instead_of_scattering(graph: Graph) -> None:
    """Rewrites scatter(0, places, updates) to select(places, updates, 0), where every row has one
    update. The comparison of places with their numbers is left out: it is computed with the rest.

    The gradient of `take_along_axis`, which a cross entropy takes from its logits, is such a
    scatter. What reads the result then computes it: it is no array of its own.
    """
    for block in blocks(graph):
        changes = Changes(block)
        for operation in block.operations:
            if operation.name == "scatter" and _has_one_for_each_row(operation):
                changes.put(operation, _chosen(operation))
        changes.apply()


def _has_one_for_each_row(scatter: Operation) -> bool:
    if len(scatter.results) != 1 or scatter.attributes.get("reducer") != "add":
        return False
    zeros, _, updates = scatter.operands
    along = scatter.attributes.get("scatter_dims", ())
    # All other dimensions are batches then: no part of a window, and not inserted.
    if scatter.attributes.get("update_window_dims") or len(along) != 1:
        return False
    if scatter.attributes.get("inserted_window_dims") != along:
        return False
    rows = tuple(1 if place in along else size for place, size in enumerate(zeros.shape))
    return updates.shape == rows and _is_filled(zeros)


def _is_filled(value: Value) -> bool:
    """Whether all elements are one constant, in most programs 0."""
    maker = value.producer
    if maker is None or maker.name != "broadcast_in_dim":
        return False
    (scalar,) = maker.operands
    return not scalar.shape and scalar.producer is not None and scalar.producer.name == "constant"


def _chosen(scatter: Operation) -> list[Operation]:
    zeros, places, updates = scatter.operands
    (result,) = scatter.results
    column = like(updates, dtype=places.dtype)
    made = [Operation(name="reshape", operands=[places], results=[column], source=scatter.source)]
    wide: list[Value] = []
    for one in (column, updates):
        repeated = like(result, dtype=one.dtype)
        wide.append(repeated)
        made.append(
            Operation(
                name="broadcast_in_dim",
                operands=[one],
                results=[repeated],
                attributes={"dims": tuple(range(len(result.shape)))},
                source=scatter.source,
            )
        )
    chosen = Operation(name="select", operands=[*wide, zeros], results=[], source=scatter.source)
    set_operands(scatter, ())
    take_result(chosen, result)
    return [*made, chosen]
