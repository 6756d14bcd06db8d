"""Brings a module to the form in which XLA passes it to Shardy (jax).

Where several shardings could be propagated to a value, the first one wins, and which comes first
depends on the order of the operations. XLA converts a step to HLO and back before it propagates:
afterwards the operations are in the post-order of a walk from the results to the operands, first
operands first (`HloComputation::MakeInstructionPostOrder`), and not in the order in which jax
traced them. The conversion also turns a broadcast that repeats nothing into a reshape, and drops
reshapes that undo each other. The TPU's compiler simplifies products before that, and makes one of
equal operations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from automesh.sharding.attribute_names import DIMENSIONS

_NO_TERMINATOR = frozenset(("builtin.module",))


def bring_to_hlo_form(module: Any, ir: Any, *, merges_equal: bool = False) -> None:
    """Reorders every block of a module, those inside operations included.

    Args:
      module: the operation of a module; changed in place.
      ir: MLIR's Python classes.
      merges_equal: make one of equal operations first, as the TPU's compiler does.
    """
    for region in module.regions:
        for block in region.blocks:
            for view in list(block.operations):
                if view.operation.name == "stablehlo.broadcast_in_dim":
                    _broadcast_without_ones(view.operation, ir)
            for view in list(block.operations):
                if view.operation.name == "stablehlo.reshape":
                    _drop_reshape_back(view.operation, ir)
            if merges_equal:
                _merge_equal(block, ir)
            operations = [view.operation for view in block.operations]
            if module.name not in _NO_TERMINATOR and len(operations) > 2:
                _reorder(operations, ir)
            for operation in operations:
                bring_to_hlo_form(operation, ir, merges_equal=merges_equal)


def fold_transposes(module: Any, ir: Any) -> None:
    """Rewrites transpose(dot(a, b)) to dot(b, a), as the TPU's compiler does before it propagates.

    The gradient of a weight is such a product: which of its operands comes first decides which
    sharding reaches it. Seen in dumps of libtpu 0.0.52 (`simplification-1`, before `shardy-xla`);
    those of the CPU's compiler propagate the product as it was traced.

    Args:
      module: the operation of a module; changed in place.
      ir: MLIR's Python classes.
    """
    for region in module.regions:
        for block in region.blocks:
            for view in list(block.operations):
                if view.operation.name == "stablehlo.transpose":
                    _fold(view.operation, ir)
                else:
                    fold_transposes(view.operation, ir)


# Have effects, or give something else each time; what a call does is unknown.
_APART = frozenset(
    f"stablehlo.{name}" for name in ("custom_call", "infeed", "outfeed", "recv", "rng", "send")
)
_REDUCE, _CONSTANT = "stablehlo.reduce", "stablehlo.constant"
# Reductions by one of these are equal if their operands are.
_COMBINERS = frozenset(
    f"stablehlo.{name}" for name in ("add", "and", "maximum", "minimum", "multiply", "or")
)
# The bindings of other constants, of complex numbers for example, end the process when they are
# read.
_READABLE = frozenset(
    ("f64", "f32", "f16", "bf16", "i1", "i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64")
)


def _merge_equal(block: Any, ir: Any) -> None:
    """Makes one of the equal operations of a block.

    A value that two operations made separately may have been split in two ways; as one it is split
    in the way that reaches it first. Seen in dumps of libtpu 0.0.52: `cse` runs twice before
    `shardy-xla`, while the compilers for CPUs and GPUs propagate equal operations apart. libtpu
    also merges what stays apart here: loops, sorts, scatters, windows, reductions of several
    arrays, and sums of the same two operands in another order.
    """
    first: dict[tuple[Any, ...], Any] = {}
    for view in list(block.operations):
        operation = view.operation
        key = _identity(operation, ir)
        if key is None:
            continue
        known = first.setdefault(key, operation)
        if known is not operation:
            for result, same in zip(operation.results, known.results, strict=True):
                result.replace_all_uses_with(same)
            operation.erase()


def _identity(operation: Any, ir: Any) -> tuple[Any, ...] | None:
    """Returns what operations are equal by; None if they stay apart."""
    if operation.name in _APART or not list(operation.results):
        return None
    if operation.name == _CONSTANT:
        kind = ir.RankedTensorType(operation.results[0].type)
        if str(kind.element_type) not in _READABLE:
            return None
        return (_CONSTANT, operation.attributes["value"], kind)
    combined = ""
    if len(operation.regions):
        combined = _combined_by(operation)
        if not combined:
            return None
    return (
        operation.name,
        combined,
        tuple(operation.operands),
        frozenset(_attributes(operation).items()),
        tuple(result.type for result in operation.results),
    )


def _combined_by(operation: Any) -> str:
    """Returns the operation by which a reduction combines two scalars; empty for others than a sum
    and its like."""
    if operation.name != _REDUCE:
        return ""
    names = [view.operation.name for view in operation.regions[0].blocks[0].operations]
    is_known = len(names) == 2 and names[0] in _COMBINERS and len(list(operation.results)) == 1
    return names[0] if is_known else ""


_DOT = "stablehlo.dot_general"
_NUMBERS = "dot_dimension_numbers"
_SIDES = (("lhs", "rhs"), ("rhs", "lhs"))


def _fold(transpose: Any, ir: Any) -> None:
    """Folds one transpose, if it swaps what the two operands of a product leave."""
    dot = transpose.operands[0].owner
    if isinstance(dot, ir.Block) or dot.name != _DOT or DIMENSIONS in dot.attributes:
        return
    permutation = list(ir.DenseI64ArrayAttr(transpose.attributes["permutation"]))
    numbers = str(dot.attributes[_NUMBERS])
    batch = len(_dimensions(numbers, "lhs_batching_dimensions"))
    free = [
        ir.RankedTensorType(operand.type).rank
        - batch
        - len(_dimensions(numbers, f"{side}_contracting_dimensions"))
        for side, operand in zip(_SIDES[0], dot.operands, strict=True)
    ]
    places = list(range(batch + sum(free)))
    cut = batch + free[0]
    swapped = [*places[:batch], *places[cut:], *places[batch:cut]]
    if permutation != swapped or len(list(dot.results[0].uses)) != 1:
        return
    attributes = _attributes(dot)
    attributes[_NUMBERS] = ir.Attribute.parse(
        re.sub("lhs|rhs", lambda found: dict(_SIDES)[found[0]], numbers)
    )
    if "precision_config" in attributes:
        precisions = list(ir.ArrayAttr(attributes["precision_config"]))
        attributes["precision_config"] = ir.ArrayAttr.get(precisions[::-1])
    with ir.InsertionPoint(transpose), dot.location:
        made = ir.Operation.create(
            _DOT,
            results=[transpose.results[0].type],
            operands=list(dot.operands)[::-1],
            attributes=attributes,
        )
    transpose.results[0].replace_all_uses_with(made.results[0])
    transpose.erase()
    dot.erase()


def _dimensions(numbers: str, name: str) -> list[int]:
    """Reads one list of the dimension numbers of a product."""
    found = re.search(rf"{name} = \[([^\]]*)\]", numbers)
    return [int(one) for one in found[1].split(",")] if found else []


def _reorder(operations: list[Any], ir: Any) -> None:
    *body, terminator = operations
    inside = {operation: place for place, operation in enumerate(body)}
    needed = [_needs(operation, inside, ir) for operation in body]
    used = {place for places in needed for place in places}
    roots = [*_needs(terminator, inside, ir)]
    roots += [place for place in range(len(body)) if place not in used]
    for place in _post_order(roots, needed):
        body[place].move_before(terminator)


def _needs(operation: Any, inside: dict[Any, int], ir: Any) -> list[int]:
    """Returns positions of the operations that make what an operation and its regions read."""
    found = [*_made_by(_operands(operation, ir), inside, ir)]
    for region in operation.regions:
        for block in region.blocks:
            for view in block.operations:
                found += _needs(view.operation, inside, ir)
    return found


def _operands(operation: Any, ir: Any) -> list[Any]:
    """Returns the operands; for a loop, unchanged ones come last, in the order of their use.

    The conversion to HLO removes unchanged operands from the loop and adds them again, except those
    that the loop does not read. Those are still operands here, and must come before the loop.
    """
    operands = list(operation.operands)
    if operation.name != "stablehlo.while":
        return operands
    body = operation.regions[1].blocks[0]
    *_, last = body.operations
    returned = list(last.operation.operands)
    kept = {place for place, argument in enumerate(body.arguments) if returned[place] == argument}
    used: dict[int, None] = {}
    for region in operation.regions:
        block = region.blocks[0]
        for value in _read(block):
            if isinstance(value.owner, ir.Block) and value.owner == block:
                used.setdefault(ir.BlockArgument(value).arg_number)
    changed = [place for place in range(len(returned)) if place not in kept]
    read = [place for place in used if place in kept]
    return [operands[place] for place in (*changed, *read, *sorted(kept.difference(used)))]


def _broadcast_without_ones(broadcast: Any, ir: Any) -> None:
    """Replaces a broadcast by a reshape where nothing is repeated, or puts one in front."""
    operand, result = broadcast.operands[0], broadcast.results[0]
    before, after = ir.RankedTensorType(operand.type), ir.RankedTensorType(result.type)
    if before.rank == 0 or after.rank == 0:
        return
    sizes = list(before.shape)
    dimensions = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
    if math.prod(sizes) == math.prod(after.shape) and dimensions == sorted(dimensions):
        _replace(broadcast, "stablehlo.reshape", after, operand, ir)
        return
    repeated = [
        place
        for place, size in enumerate(sizes)
        if size == 1 and after.shape[dimensions[place]] != 1
    ]
    if not repeated or DIMENSIONS in broadcast.attributes:
        return
    rest = [place for place in range(before.rank) if place not in repeated]
    smaller = ir.RankedTensorType.get([sizes[place] for place in rest], before.element_type)
    with ir.InsertionPoint(broadcast), broadcast.location:
        made = ir.Operation.create("stablehlo.reshape", results=[smaller], operands=[operand])
    broadcast.operands[0] = made.results[0]
    kept = [dimensions[place] for place in rest]
    broadcast.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get(kept)


def _drop_reshape_back(reshape: Any, ir: Any) -> None:
    """Replaces a reshape to the shape that its operand was reshaped from."""
    before = reshape.operands[0].owner
    if isinstance(before, ir.Block) or before.name != "stablehlo.reshape":
        return
    if before.operands[0].type == reshape.results[0].type:
        reshape.results[0].replace_all_uses_with(before.operands[0])


def _replace(operation: Any, name: str, result: Any, operand: Any, ir: Any) -> None:
    with ir.InsertionPoint(operation), operation.location:
        made = ir.Operation.create(
            name,
            results=[result],
            operands=[operand],
            attributes=_attributes(operation, without="broadcast_dimensions"),
        )
    operation.results[0].replace_all_uses_with(made.results[0])
    operation.erase()


def _attributes(operation: Any, without: str = "") -> dict[str, Any]:
    # Iterating yields names in some versions of jaxlib, and pairs in others.
    pairs = [operation.attributes[place] for place in range(len(operation.attributes))]
    return {one.name: one.attr for one in pairs if one.name != without}


def _read(block: Any) -> Iterator[Any]:
    """Lists what the operations of a block read, nested ones first; without its returned values."""
    *body, _ = block.operations
    for view in body:
        for region in view.operation.regions:
            for inner in region.blocks:
                yield from _read(inner)
        yield from view.operation.operands


def _made_by(values: Iterable[Any], inside: dict[Any, int], ir: Any) -> Iterator[int]:
    for value in values:
        owner = value.owner
        if not isinstance(owner, ir.Block):
            place = inside.get(owner)
            if place is not None:
                yield place


def _post_order(roots: Iterable[int], needed: list[list[int]]) -> Iterator[int]:
    """Orders every position after those that it needs; the first needed one comes first."""
    done: set[int] = set()
    for root in roots:
        stack = [(root, iter(needed[root]))] if root not in done else []
        done.add(root)
        while stack:
            place, rest = stack[-1]
            following = next((one for one in rest if one not in done), None)
            if following is None:
                stack.pop()
                yield place
            else:
                done.add(following)
                stack.append((following, iter(needed[following])))
