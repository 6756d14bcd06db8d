"""Rewrites cumulative operations on GPUs to the form of all other platforms (jax).

For GPUs jax 0.12 lowers `jnp.cumsum`, `cumprod`, `cummax` and `cummin` to `chlo.scan`, which XLA
passes to a library as one operation. Shardy knows no scans, and the pass before it turns them into
loops over single rows. A window over all previous rows is equivalent, as on CPUs and TPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SCAN = "chlo.scan"


def scans_as_windows(module: Any, ir: Any) -> None:
    """Replaces scans that reduce one array by one operation with windows.

    Args:
      module: the operation of a module; changed in place.
      ir: MLIR's Python classes.
    """
    for scan in list(_scans(module)):
        reducer = _reducer(scan)
        if reducer:
            with ir.InsertionPoint(scan), scan.location:
                _replace(scan, reducer, ir)


def _reducer(scan: Any) -> str:
    """Returns the reducer, as `stablehlo.add`; empty if the scan is no forward reduction."""
    attributes = scan.attributes
    block = scan.regions[0].blocks[0]
    body = [view.operation for view in block.operations]
    is_simple = (
        len(scan.operands) == 2
        and str(attributes["is_associative"]) == "true"
        and str(attributes["is_reverse"]) == "false"
        and len(body) == 2
        and list(body[0].operands) == list(block.arguments)
        # The last row is the second result, which is in the first one, too.
        and not list(scan.results[1].uses)
    )
    return str(body[0].name) if is_simple else ""


def _replace(scan: Any, reducer: str, ir: Any) -> None:
    array, dimension = scan.operands[0], int(ir.IntegerAttr(scan.attributes["dimension"]).value)
    kind = ir.RankedTensorType(array.type)
    scalar = ir.RankedTensorType.get([], kind.element_type)
    sizes = [kind.shape[d] if d == dimension else 1 for d in range(kind.rank)]
    padding = ", ".join(
        f"[{kind.shape[d] - 1 if d == dimension else 0}, 0]" for d in range(kind.rank)
    )
    # The neutral element of the reduction; analyses of shapes do not need its value.
    first = ir.Operation.create(
        "stablehlo.constant",
        results=[scalar],
        attributes={"value": ir.DenseElementsAttr.get_splat(scalar, _zero(kind.element_type, ir))},
    )
    window = ir.Operation.create(
        "stablehlo.reduce_window",
        results=[array.type],
        operands=[array, first.results[0]],
        attributes={
            "window_dimensions": ir.DenseI64ArrayAttr.get(sizes),
            "padding": ir.Attribute.parse(f"dense<[{padding}]> : tensor<{kind.rank}x2xi64>"),
        },
        regions=1,
    )
    block = window.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        made = ir.Operation.create(reducer, results=[scalar], operands=list(block.arguments))
        ir.Operation.create("stablehlo.return", operands=[made.results[0]])
    scan.results[0].replace_all_uses_with(window.results[0])
    scan.erase()


def _zero(element: Any, ir: Any) -> Any:
    if str(element).startswith(("i", "ui")):
        return ir.IntegerAttr.get(element, 0)
    return ir.FloatAttr.get(element, 0.0)


def _scans(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for view in block.operations:
                if view.operation.name == _SCAN:
                    yield view.operation
                yield from _scans(view.operation)
