"""Rewrites for TPUs: what is moved for products alone is moved in bfloat16."""

from __future__ import annotations

from automesh.ir.graph import Graph, Operation, Value
from automesh.ir.op_kinds import VIEWS
from automesh.ir.passes.edits import blocks, like, returned_values, set_operands

# Key in `Operation.attributes` of a product whose float32 operand is moved in bfloat16.
IS_STATED_WIDE = "is_stated_wide"
# The same of a conversion that the script does not have.
IS_OF_COMPILER = "is_of_compiler"
_MOVES = frozenset(("all_gather", "all_to_all", "collective_permute"))
_ON_THE_WAY = VIEWS - {"optimization_barrier"} | {
    "all_slice",
    "dynamic_slice",
    "slice",
    "transpose",
}
_PRODUCTS = frozenset(("dot_general", "convolution"))


def move_narrow_for_products(graph: Graph) -> None:
    """Rewrites dot(all_gather(x)) to dot(all_gather(convert(x))), for x in float32.

    A TPU multiplies float32 in one pass of bfloat16 unless the product asks for more. The ring of
    a windowed product moves bfloat16, too, once it has been decided by the bytes of float32.
    """
    returned = returned_values(graph)
    for block in blocks(graph):
        for place, operation in reversed(list(enumerate(block.operations))):
            if operation.name not in _MOVES or len(operation.results) != 1:
                continue
            found: list[Value] = []
            if not _is_for_products(operation.results[0], returned, found):
                continue
            narrow = like(operation.operands[0], dtype="bf16")
            narrow.stated = operation.operands[0].stated
            before = Operation(
                name="convert",
                operands=list(operation.operands),
                results=[narrow],
                attributes={IS_OF_COMPILER: True},
                source=operation.source,
            )
            set_operands(operation, [narrow])
            block.operations.insert(place, before)
            for value in found:
                value.dtype = "bf16"
                for user in value.users:
                    if user.name in _PRODUCTS:
                        user.attributes[IS_STATED_WIDE] = True


def _is_for_products(value: Value, returned: set[Value], found: list[Value]) -> bool:
    """Whether products alone read a float32 value; collects it and its views in `found`."""
    if value.dtype != "f32" or not value.users or value in returned:
        return False
    found.append(value)
    return all(_leads_to_products(user, value, returned, found) for user in set(value.users))


def _leads_to_products(
    user: Operation, value: Value, returned: set[Value], found: list[Value]
) -> bool:
    if user.name in _PRODUCTS:
        return not user.attributes.get("is_precise")
    if user.name not in _ON_THE_WAY:
        return False
    if user.name in VIEWS and len(user.results) == len(user.operands):
        # Manual regions take and return several values at once.
        views = [r for o, r in zip(user.operands, user.results, strict=True) if o is value]
        return all(_is_for_products(view, returned, found) for view in views)
    is_first = len(user.results) == 1 and user.operands[0] is value
    return is_first and _is_for_products(user.results[0], returned, found)
