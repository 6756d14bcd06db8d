"""Finds how numbers in a program (dimensions, trip counts) depend on mesh axes (jax).

Inside a manual region a program states the shape of one device's part. Two programs with the same
operations are compared number by number: doubling one axis shows how each number depends on it, as
a power of the axis' size or, for trip counts such as `n - 1`, linearly; the dimensions of tiny
arrays with another dependence (an array of `n - 1` indices) are ignored. Axes are assumed to be
independent of each other; `Fit.holds` finds where that, or another assumption here, is wrong.

The numbers are read from lowered modules, and the fit is stored there as attributes of the
operations. Shardy's passes keep them, and `mlir.module` reads them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from automesh.cost.terms import Monomial, Sum
from automesh.sharding.attribute_names import COST, DIMENSIONS, TRIPS
from automesh.sharding.mlir.attributes import config_text, stated_cost
from automesh.sharding.mlir.trip_counts import trips
from automesh.sharding.passes import Bindings, bindings, functions_of

Numbers = NDArray[np.float64]
Powers = tuple[tuple[str, int], ...]
_LARGEST_POWER = 3
# Arrays of so few elements are counters and indices; the fit may ignore their growth.
_TINY = 64
# Marks an ignored dependence of a dimension.
ANYHOW = ("?", 0)
_UNKNOWN = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The numbers of a program at some axis sizes, in program order.

    Attributes:
      elements: size of the array that each number is a dimension of; infinite for other numbers.
    """

    sizes: Mapping[str, int]
    numbers: Numbers
    elements: Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slope:
    """The effect of one axis on the numbers: `power` where `linear` is False, else `a * n + b`."""

    power: NDArray[np.int64]
    linear: NDArray[np.bool_]
    a: Numbers
    b: Numbers


@dataclass(slots=True, kw_only=True)
class Fit:
    """The numbers of one program as functions of axis sizes.

    Attributes:
      base: the sample that all others are compared with.
    """

    base: Sample
    _slopes: dict[str, _Slope] = field(default_factory=dict[str, _Slope])
    _ignored: NDArray[np.bool_] | None = None

    def knows(self, axis: str) -> bool:
        return axis in self._slopes

    def learn(self, axis: str, sample: Sample) -> None:
        """Learns from a sample that differs from the base in the size of `axis` alone."""
        before, after = self.base.sizes.get(axis, 1), sample.sizes.get(axis, 1)
        old, new = self.base.numbers, sample.numbers
        ratio = np.divide(new, old, out=np.ones_like(new), where=(old != 0) & (new != 0))
        power = np.rint(np.log(np.abs(ratio)) / np.log(after / before)).astype(np.int64)
        exact = np.isclose(old * (after / before) ** power.astype(np.float64), new, rtol=1e-12)
        linear = ~exact | (np.abs(power) > _LARGEST_POWER)
        a = (new - old) / (after - before)
        tiny = linear & (np.maximum(self.base.elements, sample.elements) <= _TINY)
        self._ignored = tiny if self._ignored is None else self._ignored | tiny
        linear &= ~tiny
        self._slopes[axis] = _Slope(
            power=np.where(linear | tiny, 0, power), linear=linear, a=a, b=old - a * before
        )

    def at(self, sizes: Mapping[str, int]) -> Numbers:
        """Computes the numbers at other sizes; all axes that differ from the base must be known."""
        numbers = self.base.numbers.copy()
        for axis in sorted({*sizes, *self.base.sizes}):
            before, after = self.base.sizes.get(axis, 1), sizes.get(axis, 1)
            if before == after:
                continue
            slope = self._slopes[axis]
            numbers *= (after / before) ** slope.power.astype(np.float64)
            factor = np.divide(
                slope.a * after + slope.b,
                self.base.numbers,
                out=np.ones_like(numbers),
                where=slope.linear & (self.base.numbers != 0),
            )
            numbers *= factor
            # A loop that does not run at the base's sizes cannot be scaled.
            from_zero = slope.linear & (self.base.numbers == 0)
            numbers[from_zero] += (slope.a * after + slope.b)[from_zero]
        return numbers

    def holds(self, sample: Sample) -> bool:
        """Whether the fit predicts the numbers of `sample`."""
        expected = self.at(sample.sizes)
        if expected.shape != sample.numbers.shape:
            return False
        same = np.isclose(expected, sample.numbers, rtol=1e-9, atol=1e-9)
        return bool((same if self._ignored is None else same | self._ignored).all())

    def powers(self, index: int) -> tuple[tuple[str, int], ...]:
        """Returns axes and powers of one number, sorted by axis, without its linear axes."""
        return tuple(
            (axis, int(slope.power[index]))
            for axis, slope in sorted(self._slopes.items())
            if slope.power[index]
        )

    def is_ignored(self, index: int) -> bool:
        """Whether a number's dependence is ignored, as for arrays of indices."""
        return self._ignored is not None and bool(self._ignored[index])

    def linear_axes(self, index: int) -> tuple[str, ...]:
        """Returns the axes on which one number depends linearly, sorted."""
        return tuple(axis for axis, slope in sorted(self._slopes.items()) if slope.linear[index])

    def varying(self) -> dict[str, NDArray[np.int64]]:
        """Returns, per axis, the positions of the numbers that depend on it, or may."""
        ignored = False if self._ignored is None else self._ignored
        return {
            axis: np.flatnonzero((slope.power != 0) | slope.linear | ignored)
            for axis, slope in sorted(self._slopes.items())
        }

    def formula(self, index: int) -> Sum | None:
        """Returns one number as a sum; None if it depends linearly on more than one axis."""
        linear, powers = self.linear_axes(index), dict(self.powers(index))
        value = float(self.base.numbers[index])
        for axis, power in powers.items():
            value /= float(self.base.sizes.get(axis, 1)) ** power
        if not linear:
            return (_monomial(value, powers),) if value else ()
        axis = linear[0]
        slope = self._slopes[axis]
        if len(linear) > 1 or (not value and powers):
            return None
        scale = value / float(self.base.numbers[index]) if value else 1.0
        return tuple(
            _monomial(scale * float(coefficient), {**powers, **more})
            for coefficient, more in ((slope.a[index], {axis: 1}), (slope.b[index], {}))
            if coefficient
        )


def _monomial(coefficient: float, powers: Mapping[str, int]) -> Monomial:
    return Monomial(
        coefficient=coefficient,
        powers=tuple(sorted((axis, power) for axis, power in powers.items() if power)),
    )


# Reading numbers from a module, and storing the fit in it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The numbers of one module.

    Attributes:
      signature: equal for programs that only differ in numbers.
      numbers: dimensions of all results; trip counts of loops, -1 where unknown; costs that custom
        calls state.
      elements: see `fitting.Sample`.
    """

    signature: str
    numbers: Numbers
    elements: Numbers


def count_numbers(module: Any) -> Counted:
    """Reads the numbers of a lowered module, in the order of its operations."""
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
        count = trips(operation, {}).count
        return [_UNKNOWN if count is None else float(count)]
    if operation.name == "stablehlo.custom_call":
        return list(stated_cost(config_text(found.ir, operation)).values())
    return []


def note_fit(module: Any, fit: Fit, report: Callable[[str], None]) -> None:
    """Stores at the operations of `module` how their numbers depend on axis sizes.

    Args:
      report: called with every axis on which some number depends without a formula.
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
    """Yields every operation with its results' types and shapes; calls are replaced by callees."""
    functions = functions_of(module.operation, found.ir)
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
    noted: list[list[Powers]] = []
    for _, shape in shapes:
        dimensions: list[Powers] = []
        for _ in shape:
            index = next(left)
            for axis in fit.linear_axes(index):
                report(axis)
            dimensions.append((ANYHOW,) if fit.is_ignored(index) else fit.powers(index))
        noted.append(dimensions)
    operation.attributes[DIMENSIONS] = found.ir.StringAttr.get(json.dumps(noted))


def read_dimensions(text: str) -> list[list[Powers]]:
    """Reads, per dimension of each result, the axes and powers of `note_fit`, or ANYHOW."""
    return [[_powers(dimension) for dimension in dimensions] for dimensions in json.loads(text)]


def _note_formulas(
    found: Bindings,
    operation: Any,
    key: str,
    fit: Fit,
    places: range,
    report: Callable[[str], None],
) -> None:
    noted: list[list[tuple[float, Powers]]] = []
    for index in places:
        formula = fit.formula(index)
        if formula is None or (key == COST and len(formula) > 1):
            for axis in (*fit.linear_axes(index), *(axis for axis, _ in fit.powers(index))):
                report(axis)
            return
        noted.append([(one.coefficient, one.powers) for one in formula])
    operation.attributes[key] = found.ir.StringAttr.get(json.dumps(noted))


def read_formulas(text: str) -> list[Sum]:
    """Reads the sums that `note_fit` has stored."""
    return [
        tuple(Monomial(coefficient=number, powers=_powers(powers)) for number, powers in formula)
        for formula in json.loads(text)
    ]


def _powers(pairs: Any) -> Powers:
    return tuple((str(axis), int(power)) for axis, power in pairs)
