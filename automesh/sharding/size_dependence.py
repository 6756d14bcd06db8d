"""Reads the numbers of a lowered module that may depend on axis sizes, and notes the fit (jax).

The notes are attributes of the operations. They outlive Shardy's passes; `mlir.module` reads them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from automesh.cost.terms import Monomial, Sum
from automesh.sharding.mlir.attributes import config_text, stated_cost
from automesh.sharding.mlir.trip_counts import trips
from automesh.sharding.passes import Bindings, bindings
from automesh.sharding.size_fit import Fit, Numbers

# Stands for the dependence of a dimension that is not looked at.
ANYHOW = ("?", 0)
DIMENSIONS, TRIPS, COST = "automesh.dimensions", "automesh.trips", "automesh.cost"
_UNKNOWN = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The numbers of one module.

    Attributes:
      signature: equal for programs that differ in numbers alone.
      numbers: dimensions of all results; trip counts of loops, -1 where unknown; what custom calls
        state as their cost.
      elements: see `fitting.Sample`.
    """

    signature: str
    numbers: Numbers
    elements: Numbers


def count_numbers(module: Any) -> Counted:
    """The numbers of a lowered module, in the order of its operations."""
    found = bindings()
    numbers: list[float] = []
    elements: list[float] = []
    signature = hashlib.sha256()
    with module.context:
        for operation, shapes in _visited(found, module):
            signature.update(operation.name.encode())
            for dtype, shape in shapes:
                signature.update(f"{dtype}{len(shape)}".encode())
                numbers.extend(shape)
                elements.extend([float(math.prod(shape))] * len(shape))
            more = _more_numbers(found, operation)
            signature.update(str(len(more)).encode())
            numbers.extend(more)
            elements.extend([math.inf] * len(more))
    return Counted(
        signature=signature.hexdigest(),
        numbers=np.array(numbers, np.float64),
        elements=np.array(elements, np.float64),
    )


def _more_numbers(found: Bindings, operation: Any) -> list[float]:
    if operation.name == "stablehlo.while":
        count = trips(operation, {})
        return [_UNKNOWN if count is None else float(count)]
    if operation.name == "stablehlo.custom_call":
        return list(stated_cost(config_text(found.ir, operation)).values())
    return []


def note_fit(module: Any, fit: Fit, report: Callable[[str], None]) -> None:
    """Notes at the operations of `module` how their numbers depend on axis sizes.

    Args:
      report: is called with every axis on which some number depends in a way that has no formula.
    """
    found = bindings()
    varying = fit.varying()
    concerned = {int(index) for places in varying.values() for index in places}
    position = 0
    with module.context:
        for operation, shapes in _visited(found, module):
            count = sum(len(shape) for _, shape in shapes)
            own = range(position, position + count)
            position += count
            if not concerned.isdisjoint(own):
                _note_dimensions(found, operation, shapes, fit, own, report)
            more = range(position, position + len(_more_numbers(found, operation)))
            position += len(more)
            if not concerned.isdisjoint(more):
                key = TRIPS if operation.name == "stablehlo.while" else COST
                _note_formulas(found, operation, key, fit, more, report)


def _visited(
    found: Bindings, module: Any
) -> Iterator[tuple[Any, list[tuple[str, tuple[int, ...]]]]]:
    """Every operation, callees in the place of their calls, with the types and shapes of its
    results."""
    functions = {
        found.ir.StringAttr(one.attributes["sym_name"]).value: one.operation
        for one in module.operation.regions[0].blocks[0].operations
        if one.operation.name == "func.func"
    }
    operations: list[Any] = []

    def visit(operation: Any) -> Any:
        operations.append(operation)
        if operation.name == "func.call":
            callee = found.ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            functions[callee].walk(visit, found.ir.WalkOrder.PRE_ORDER)
        return found.ir.WalkResult.ADVANCE

    functions["main"].walk(visit, found.ir.WalkOrder.PRE_ORDER)
    tensor, known = found.ir.RankedTensorType, dict[Any, tuple[str, tuple[int, ...]]]()
    for operation in operations:
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for result in operation.results:
            kind = result.type
            if kind not in known:
                ranked = isinstance(kind, tensor)
                known[kind] = (
                    (str(kind.element_type), tuple(kind.shape)) if ranked else (str(kind), ())
                )
            shapes.append(known[kind])
        yield operation, shapes


def _note_dimensions(
    found: Bindings,
    operation: Any,
    shapes: list[tuple[str, tuple[int, ...]]],
    fit: Fit,
    places: range,
    report: Callable[[str], None],
) -> None:
    left = iter(places)
    noted: list[str] = []
    for _, shape in shapes:
        dimensions: list[str] = []
        for _ in shape:
            index = next(left)
            for axis in fit.linear_axes(index):
                report(axis)
            powers = (ANYHOW,) if fit.is_ignored(index) else fit.powers(index)
            dimensions.append(",".join(f"{axis}:{power}" for axis, power in powers))
        noted.append(";".join(dimensions))
    operation.attributes[DIMENSIONS] = found.ir.StringAttr.get("|".join(noted))


def read_dimensions(text: str, result: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Per dimension of one result, the axes and powers that `note_fit` has noted, or ANYHOW."""
    return tuple(
        tuple((pair.split(":")[0], int(pair.split(":")[1])) for pair in part.split(",") if pair)
        for part in text.split("|")[result].split(";")
    )


def _note_formulas(
    found: Bindings,
    operation: Any,
    key: str,
    fit: Fit,
    places: range,
    report: Callable[[str], None],
) -> None:
    noted: list[str] = []
    for index in places:
        formula = fit.formula(index)
        if formula is None or (key == COST and len(formula) > 1):
            for axis in (*fit.linear_axes(index), *(axis for axis, _ in fit.powers(index))):
                report(axis)
            return
        noted.append(_as_text(formula))
    operation.attributes[key] = found.ir.StringAttr.get("|".join(noted))


def read_formulas(text: str) -> list[Sum]:
    """The sums that `note_fit` has noted."""
    return [_as_sum(part) for part in text.split("|")]


def _as_sum(text: str) -> Sum:
    found: list[Monomial] = []
    for one in filter(None, text.split(";")):
        coefficient, *powers = one.split(",")
        pairs = [power.split(":") for power in powers]
        found.append(
            Monomial(
                coefficient=float(coefficient),
                powers=tuple((axis, int(power)) for axis, power in pairs),
            )
        )
    return tuple(found)


def _as_text(formula: Sum) -> str:
    return ";".join(
        ",".join([repr(one.coefficient), *(f"{axis}:{power}" for axis, power in one.powers)])
        for one in formula
    )
