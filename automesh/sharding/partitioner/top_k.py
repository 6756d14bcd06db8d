"""The largest elements of each row, which XLA knows as one operation (jax's MLIR bindings).

jax states them by `chlo.top_k`. XLA propagates shardings through that as through a custom call: of
the rows, not of the places in a row. Shardy's own pass would make a sort and a slice of it first,
and split the places that are kept like those that were sorted. The compilers for TPUs and GPUs do
so before they propagate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TARGET = "mhlo.topk"
_NAME, _CALL, _COUNT = "chlo.top_k", "stablehlo.custom_call", "k"


def top_k_as_call(module: Any, ir: Any) -> None:
    """Replaces every `chlo.top_k` by a custom call, which other passes keep.

    Args:
      module: the operation of a module; changed in place.
      ir: MLIR's Python classes.
    """
    for operation in list(_named(module, _NAME)):
        count = ir.IntegerAttr(operation.attributes[_COUNT]).value
        stated = {
            "call_target_name": ir.StringAttr.get(TARGET),
            "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 4),
            "mhlo.attributes": ir.Attribute.parse(f"{{k = {count} : i64, largest = true}}"),
        }
        _replace(operation, _CALL, stated, ir)


def has_top_k(module: Any, ir: Any) -> bool:
    """Whether a module has calls that `top_k_as_call` made."""
    return next(_calls(module, ir), None) is not None


def call_as_top_k(module: Any, ir: Any) -> None:
    """Undoes what `top_k_as_call` did."""
    for operation in list(_calls(module, ir)):
        count = ir.IntegerAttr(ir.DictAttr(operation.attributes["mhlo.attributes"])[_COUNT])
        _replace(operation, _NAME, {_COUNT: count}, ir)


def _calls(module: Any, ir: Any) -> Iterator[Any]:
    for operation in _named(module, _CALL):
        if ir.StringAttr(operation.attributes["call_target_name"]).value == TARGET:
            yield operation


def _replace(operation: Any, name: str, attributes: dict[str, Any], ir: Any) -> None:
    with ir.InsertionPoint(operation), operation.location:
        made = ir.Operation.create(
            name,
            results=[one.type for one in operation.results],
            operands=list(operation.operands),
            attributes=attributes,
        )
    for before, after in zip(operation.results, made.results, strict=True):
        before.replace_all_uses_with(after)
    operation.erase()


def _named(operation: Any, name: str) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for view in block.operations:
                if view.operation.name == name:
                    yield view.operation
                else:
                    yield from _named(view.operation, name)
