"""Follows whole numbers through a program: which arrays of indices hold the same ones (jax).

A source is a number for the integers of an argument, for the positions of a dimension, or for what
the step computes. Tokens keep theirs through a reshape or an offset, so that the table in which
they look up and the scores among which they choose have one vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from automesh.program.capture.flow.program import is_literal
from automesh.program.infer.dimensions import Dims
from automesh.program.infer.operation import (
    ArrayOrigin,
    Events,
    Shape,
    Source,
    TracedOperation,
    primitives,
    shape_of,
)

# Integers keep their meaning through these operations, up to an offset.
_SAME_INTEGERS = primitives(
    """
    add select_n clamp max min convert_element_type copy copy_p reshape broadcast_in_dim
    transpose squeeze slice split concatenate pad gather dynamic_slice rev stop_gradient
    sharding_constraint optimization_barrier
    """
)
_PLACES = frozenset({"argmax", "argmin", "top_k", "approx_top_k"})


class Sources:
    """The sources of a program, which are recorded in its events."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._known = 0
        self._picks: dict[tuple[int, str], int] = {}
        self._together: dict[tuple[int, ...], int] = {}

    def _next(self) -> int:
        self._known += 1
        return self._known

    def new(self, variable: Any, shape: Shape) -> Source:
        """Makes a new source for an array of integers."""
        if not shape or not _is_integer(variable):
            return ()
        return (self._next(),)

    def _begun(
        self, equation: Any, operation: TracedOperation, made: Sequence[Dims]
    ) -> list[Source]:
        """Returns the sources of positions that begin with an operation; none if it gives none."""
        name, events = operation.name, self._events
        none: list[Source] = [()] * len(operation.shapes)
        if name in _PLACES and events.places:
            self._known += 1
            events.chosen[self._known] = [events.places.pop()]
            # Of each row the places of the largest ones, or of the largest one.
            kept = made[1][int(equation.params.get("axis", -1))] if "top_k" in name else ()
            events.ranked[self._known] = kept
            return [*none[1:], (self._known,)]
        if name == "iota" and len(operation.shapes[0]) == 1:
            self._known += 1
            events.positions[self._known] = made[0][0]
            return [(self._known,)]
        # All positions in the order of given data; what the step draws makes other rows of them.
        own = [one for one in operation.sources if len(one) == 1 and one[0] in events.positions]
        if name == "sort" and len(own) == 1 and operation.together() == ArrayOrigin.DATA:
            self._known += 1
            events.ordered[self._known] = events.positions[own[0][0]]
            events.computed.add(self._known)
            return [(self._known,) if one == own[0] else () for one in operation.sources]
        return []

    def of(self, equation: Any, operation: TracedOperation, made: Sequence[Dims]) -> list[Source]:
        name, outvars = operation.name, equation.outvars
        none: list[Source] = [()] * len(outvars)
        if begun := self._begun(equation, operation, made):
            return begun
        if not _is_integer(outvars[0]):
            return none
        different = {source for source in operation.sources if source}
        columns = next(iter(different)) if len(different) == 1 else ()
        source = columns[0] if len(columns) == 1 else 0
        positions = self._events.positions
        if (stride := _stride(equation)) > 1 and source in positions:
            self._known += 1
            positions[self._known] = positions[source]
            self._events.strides[self._known] = stride * self._events.strides.get(source, 1)
            return [(self._known,)]
        is_same = (
            name in _SAME_INTEGERS
            # An offset is subtracted; a difference of two places is a new integer.
            or (name == "sub" and bool(operation.sources[0]) and not operation.sources[1])
            or (name == "sort" and len(outvars) == 1 and source not in positions)
        )
        if not is_same:  # New integers, such as drawn places of rows.
            new = [self.new(*one) for one in zip(outvars, operation.shapes, strict=True)]
            self._events.computed.update(number for source in new for number in source)
            return new
        given = operation.sources
        if name in ("gather", "dynamic_slice"):
            return [given[0]] if len(given[0]) == 1 else none
        if name == "concatenate" and equation.params["dimension"] == len(operation.shapes[0]) - 1:
            widths = [shape[-1] for shape in operation.given]
            if widths == [1] * len(widths):
                return [tuple(source[0] if len(source) == 1 else 0 for source in given)]
        if name in ("concatenate", "add") and len(different) > 1:
            joined = self._joined(given)
            own = {number for one in given for number in one}
            if name == "add" and own & positions.keys() - self._events.strides.keys():
                self._events.windows.update(joined)
            begins = own & self._events.strides.keys()
            if name == "add" and joined and len(begins) == 1:
                self._events.offsets[joined[0]] = next(iter(begins))
            return [joined]
        if len(different) != 1:
            return none
        source = next(iter(different))
        # A single column of a row has a meaning of its own.
        picks = [
            number
            for number, shape in enumerate(operation.shapes)
            if name in ("slice", "split")
            and any(kept == 1 < size for kept, size in zip(shape, operation.given[0], strict=True))
        ]
        return [
            self._picked(source, equation, number) if number in picks else source
            for number in range(len(outvars))
        ]

    def _joined(self, given: Sequence[Source]) -> Source:
        """Integers of several arrays end to end, which mean the same: tokens of answers that one
        network reads together. Or sums of them: numbers of a field, and where its rows begin."""
        if any(len(source) != 1 for source in given):
            return ()
        numbers = tuple(source[0] for source in given)
        if numbers not in self._together:
            self._known += 1
            self._together[numbers] = self._known
        return (self._together[numbers],)

    def _picked(self, source: Source, equation: Any, number: int) -> Source:
        if len(source) != 1:
            return ()
        key = (source[0], str(equation.params.get("start_indices", number)))
        if key not in self._picks:
            self._known += 1
            self._picks[key] = self._known
        return (self._picks[key],)

    def counted(self, variable: Any, dims: Dims) -> Source:
        """Makes a source for a whole number that a loop carries: the number of its turn, by which
        it takes one of several layers."""
        if dims or not _is_integer(variable):
            return ()
        return (self._next(),)


def _is_integer(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"


def _stride(equation: Any) -> int:
    """Returns the number that an equation multiplies integers by; 0 if it is no such equation."""
    if equation.primitive.name != "mul":
        return 0
    numbers = [var.val for var in equation.invars if is_literal(var) and not shape_of(var)]
    return int(numbers[0]) if len(numbers) == 1 else 0
