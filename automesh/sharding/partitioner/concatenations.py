"""Concatenations along a dimension that is split (jax's MLIR bindings).

Shardy lets the pieces of an array stay split along the dimension in which they are put together,
as if rows moved to neighbours alone. XLA's partitioner has methods for two pieces of one array
that change places, as `jnp.roll` makes them (`FindRotateRightPattern`), and for an array with
pieces of its own on both sides, as of a periodic grid (`FindPadWithWrapPattern`). In any other
concatenation each device makes all rows of a part of the columns, or all of the array
(`HandleConcatenate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_RULE = "sdy.sharding_rule"
_SLICE = "stablehlo.slice"
_MOVES, _STAYS = "permutation=", "need_replication="


def make_whole_along(operation: Any, ir: Any) -> None:
    """States that a concatenation wants its dimension whole, unless rows of one array move.

    Args:
      operation: with the sharding rule that propagation left; changed in place.
      ir: MLIR's Python classes.
    """
    if _RULE not in operation.attributes or _moves_rows(operation, ir):
        return
    rule = str(operation.attributes[_RULE])
    if _MOVES in rule:
        stated = rule.replace(_MOVES, _STAYS)
        operation.attributes[_RULE] = ir.Attribute.parse(stated)


def _moves_rows(operation: Any, ir: Any) -> bool:
    """Whether the operands are the two ends of an array, the last rows first, or an array between
    pieces of its own."""
    operands = list(operation.operands)
    if len(operands) not in (2, 3):
        return False
    first, last = operands[0].owner, operands[-1].owner
    if not (_is_piece(first, ir) and _is_piece(last, ir)):
        return False
    if len(operands) == 3:
        return bool(first.operands[0] == operands[1] == last.operands[0])
    if first.operands[0] != last.operands[0]:
        return False
    dimension = int(ir.IntegerAttr(operation.attributes["dimension"]).value)
    rows = ir.RankedTensorType(first.operands[0].type).shape[dimension]
    cut = _bounds(first, "start_indices", ir)[dimension]
    return (
        _bounds(first, "limit_indices", ir)[dimension] == rows
        and _bounds(last, "start_indices", ir)[dimension] == 0
        and _bounds(last, "limit_indices", ir)[dimension] == cut
    )


def _is_piece(owner: Any, ir: Any) -> bool:
    """Whether a slice makes a value, which nothing else reads."""
    return (
        not isinstance(owner, ir.Block)
        and owner.name == _SLICE
        and len(list(owner.results[0].uses)) == 1
    )


def _bounds(piece: Any, name: str, ir: Any) -> Sequence[int]:
    return list(ir.DenseI64ArrayAttr(piece.attributes[name]))
