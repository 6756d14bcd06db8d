"""Makes Shardy put reshards where XLA's partitioner puts them: before elementwise operations.

Shardy's explicit reshards compute an elementwise operation with whatever sharding moves the least:
`convert` from f32 to bf16 in front of a gather stays split, and bf16 is gathered. XLA runs Shardy's
propagation alone; its own partitioner then brings the operands of every elementwise operation to
the sharding of the result (`HandleElementwise` in xla/service/spmd/spmd_partitioner.cc): f32 is
gathered. Both functions run between propagation and `sdy-insert-explicit-reshards`.
"""

from __future__ import annotations

from typing import Any

# HloInstruction::IsElementwise, in the names of StableHLO.
_ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "complex", "convert",
        "cosine", "count_leading_zeros", "divide", "exponential", "exponential_minus_one", "floor",
        "imag", "is_finite", "log", "log_plus_one", "logistic", "maximum", "minimum", "multiply",
        "negate", "not", "or", "popcnt", "power", "real", "reduce_precision", "remainder",
        "round_nearest_afz", "round_nearest_even", "rsqrt", "select", "shift_left",
        "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "sqrt", "subtract", "tan",
        "tanh", "xor",
    )
)  # fmt: skip
_SHARDING = "sdy.sharding"
# Attribute of products: mesh axes that split left side, right side and result before reshards are
# inserted, each as `dp,tp`; `?` where that is not written at the value itself.
DECLARED = "automesh.declared"


def reshard_before_elementwise(module: Any, ir: Any, sdy: Any) -> None:
    """Inserts `sdy.reshard` on operands of elementwise operations that are split differently.

    Args:
      module: the operation of a module whose shardings are propagated and closed; changed in place.
      ir: MLIR's Python classes.
      sdy: those of the Shardy dialect.
    """
    operations = _operations_in(module)
    meshes = [one for one in operations if one.name == "sdy.mesh"]
    if not meshes:
        return
    mesh = ir.StringAttr(meshes[0].attributes["sym_name"]).value
    for operation in operations:
        if operation.name not in _ELEMENTWISE or len(operation.results) != 1:
            continue
        rank = ir.RankedTensorType(operation.results[0].type).rank
        if rank == 0:
            continue
        wanted = _sharding_at_definition(operation.results[0], ir, sdy)
        for position, operand in enumerate(operation.operands):
            # Scalars next to arrays: the predicate of `select`, the bounds of `clamp`.
            if ir.RankedTensorType(operand.type).rank == rank and not _is_split_as(
                wanted, operand, ir, sdy
            ):
                target = wanted or _whole(mesh, rank, sdy)
                with ir.InsertionPoint(operation), operation.location:
                    operation.operands[position] = sdy.ReshardOp(operand, target).result


def note_declared_shardings(module: Any, ir: Any, sdy: Any) -> None:
    """Notes at each matrix product how its operands and its result are split by propagation alone.

    What a gather is for is lost in explicit collectives: XLA cuts it into a ring around the product
    only if the product itself asks for it.

    Args:
      module: as for `reshard_before_elementwise`, and before it.
      ir: MLIR's Python classes.
      sdy: those of the Shardy dialect.
    """
    for operation in _operations_in(module):
        if operation.name == "stablehlo.dot_general":
            values = (*operation.operands, operation.results[0])
            noted = [ir.StringAttr.get(_axes_at_definition(one, ir, sdy)) for one in values]
            operation.attributes[DECLARED] = ir.ArrayAttr.get(noted)


def _axes_at_definition(value: Any, ir: Any, sdy: Any) -> str:
    if isinstance(value.owner, ir.Block):
        return "?"
    sharding = _sharding_at_definition(value, ir, sdy)
    if sharding is None:
        return ""
    dimensions = sdy.TensorShardingAttr(sharding).dimension_shardings
    references = [one for each in dimensions for one in sdy.DimensionShardingAttr(each).axes]
    return ",".join(str(sdy.AxisRefAttr(one).name) for one in references)


def _operations_in(root: Any) -> list[Any]:
    found: list[Any] = []
    for region in root.regions:
        for block in region.blocks:
            for view in block.operations:
                found.append(view.operation)
                found += _operations_in(view.operation)
    return found


def _whole(mesh: str, rank: int, sdy: Any) -> Any:
    closed = sdy.DimensionShardingAttr.get([], is_closed=True)
    return sdy.TensorShardingAttr.get(mesh, [closed] * rank)


def _is_split_as(wanted: Any | None, operand: Any, ir: Any, sdy: Any) -> bool:
    # How arguments of functions, loop bodies and manual regions are split is written at what is
    # around them: a reshard to the sharding that they have already vanishes later.
    if isinstance(operand.owner, ir.Block):
        return False
    present = _sharding_at_definition(operand, ir, sdy)
    if wanted is None or present is None:
        return wanted is present
    return bool(wanted == present)


def _sharding_at_definition(value: Any, ir: Any, sdy: Any) -> Any | None:
    """The sharding of an operation's result; None if none is written: whole on every device."""
    attributes = value.owner.attributes
    if _SHARDING in attributes:
        shardings = sdy.TensorShardingPerValueAttr(attributes[_SHARDING]).shardings
        return list(shardings)[ir.OpResult(value).result_number]
    # A reshard's own is not per value.
    return attributes["sharding"] if value.owner.name == "sdy.reshard" else None
