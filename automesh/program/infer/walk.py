"""Walks a traced program once and joins the dimensions that must agree (jax).

Bodies of loops are walked once as well, since carried values have the same dimensions in all turns.
The time is proportional to the number of equations; those of called programs count at each call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from automesh.program.capture.flow.expanded import expansion_of
from automesh.program.capture.flow.program import (
    is_backward,
    is_differentiated,
    is_literal,
    loop_body,
    opened_jaxpr,
    solver_of,
    solver_operands,
)
from automesh.program.infer.dimensions import Dim, DimensionMark, Dimensions, Dims
from automesh.program.infer.operation import (
    ArrayOrigin,
    Contraction,
    Division,
    Draw,
    EquationPlace,
    Events,
    Loop,
    Move,
    Rule,
    Shape,
    Source,
    TracedOperation,
    Walk,
    primitives,
)
from automesh.program.infer.rules import arrays, indexing, mapped, windows

RULES: dict[str, Rule] = {**arrays.RULES, **indexing.RULES, **windows.RULES, **mapped.RULES}
# These operations on held arrays make no new data.
_SAME_ARRAY = arrays.ELEMENTWISE | {"reshape", "transpose", "squeeze", "broadcast_in_dim"}
# Rows that are written into a held array leave it one: a replay buffer, before rows are drawn.
_WRITES_INTO = frozenset({"scatter", "dynamic_update_slice"})
# Integers keep their meaning through these operations, up to an offset.
_SAME_INTEGERS = primitives(
    """
    add select_n clamp max min convert_element_type copy copy_p reshape broadcast_in_dim
    transpose squeeze slice split concatenate pad gather dynamic_slice rev stop_gradient
    sharding_constraint optimization_barrier
    """
)
_OTHER_PARAMETERS = (KeyError, AttributeError, IndexError, TypeError, ValueError, StopIteration)
_PLACES = frozenset({"argmax", "argmin", "top_k", "approx_top_k"})
_SUMS = frozenset({"add_any", "add"})
_UNARY = frozenset(
    {"transpose", "convert_element_type", "reshape", "mul", "neg", "squeeze", "copy", "reduce_sum"}
)
# Operations between a product and a sum of it, and summands, that are searched.
_MOST_BEHIND = 32
_WRITES = frozenset({"swap", "addupdate"})
_CUTS = frozenset({"slice", "split"})


@dataclass(frozen=True, slots=True)
class WalkedArray:
    """The facts about an array while its program is walked.

    Attributes:
      is_held: whether it is an unchanged argument or a constant of the step.
      source: see `operation.Source`.
    """

    dims: Dims
    made: ArrayOrigin
    is_held: bool = False
    source: Source = ()


@dataclass(slots=True)
class _Frame:
    """One program during the walk.

    Attributes:
      path, bodies: place of the equation that calls it.
    """

    path: tuple[int, ...] = ()
    bodies: tuple[int, ...] = ()
    is_backward: bool = False
    is_differentiated: bool = False
    loop: Loop = field(default_factory=Loop)
    known: dict[Any, WalkedArray] = field(default_factory=dict[Any, WalkedArray])
    # Arrays of equal numbers, by the equation that makes them.
    equal: dict[Any, int] = field(default_factory=dict[Any, int])
    # The product behind a value, for sums that a loop carries.
    products: dict[Any, Contraction] = field(default_factory=dict[Any, Contraction])
    makers: dict[Any, Any] = field(default_factory=dict[Any, Any])


def shape_of(variable: Any) -> Shape:
    """Returns the shape of a variable; empty for a variable that is no array."""
    return tuple(int(size) for size in getattr(variable.aval, "shape", ()))


def walk(jaxpr: Any, inputs: Sequence[ArrayOrigin], *, num_held: int) -> Walked:
    """Walks a program.

    Args:
      inputs: origin of each input.
      num_held: number of leading inputs that are arrays of the step itself.
    """
    opened = opened_jaxpr(jaxpr)
    walker = _Walker()
    values = [
        WalkedArray(
            walker.all.news(shape_of(var)),
            made,
            not made & ArrayOrigin.STATE,
            walker.source(var, shape_of(var)),
        )
        for var, made in zip(opened.invars, inputs, strict=True)
    ]
    frame = _Frame()
    outputs = walker.program(opened, values, frame)
    _join_chosen(walker.all, walker.events)
    return Walked(
        all=walker.all,
        events=walker.events,
        inputs=tuple(value.dims for value in values),
        outputs=tuple(value.dims for value in outputs),
        num_held=num_held,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """The result of a walk.

    Attributes:
      inputs, outputs: dimensions of each input and output.
      num_held: number of leading inputs that are no arguments.
    """

    all: Dimensions
    events: Events
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    num_held: int


class _Walker:
    def __init__(self) -> None:
        self.all = Dimensions()
        self.events = Events()
        self._loops = 0
        self._sources_known = 0
        self._picks: dict[tuple[int, str], int] = {}
        self._together: dict[tuple[int, ...], int] = {}

    def program(
        self, jaxpr: Any, inputs: Sequence[WalkedArray], frame: _Frame
    ) -> list[WalkedArray]:
        """Walks a program with these inputs."""
        frame.known = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            shape = shape_of(var)
            frame.known[var] = WalkedArray(
                self.all.news(shape), ArrayOrigin.DATA, True, self.source(var, shape)
            )
        for number, equation in enumerate(jaxpr.eqns):
            self.events.equations += 1
            made = self._equation(number, equation, frame)
            frame.known.update(zip(equation.outvars, made, strict=True))
        return [self._value(var, frame) for var in jaxpr.outvars]

    def _value(self, variable: Any, frame: _Frame) -> WalkedArray:
        if is_literal(variable):
            return WalkedArray(self.all.news(shape_of(variable)), ArrayOrigin(0))
        return frame.known[variable]

    def _equation(self, number: int, equation: Any, frame: _Frame) -> list[WalkedArray]:
        name = equation.primitive.name
        given = [self._value(var, frame) for var in equation.invars]
        backward = frame.is_backward or is_backward(equation)
        if name in RULES:
            return self._simple(number, equation, given, frame, backward)
        if name == "scan":
            return self._scan(number, equation, given, frame, backward)
        if name == "while":
            return self._while(number, equation, given, frame, backward)
        if name == "cond":
            return self._cond(number, equation, given, frame, backward)
        if name in ("get", "swap", "addupdate", "ref_new", "new_ref", "freeze", "ref_freeze",
                    "mutable_array"):  # fmt: skip
            return self._reference(name, equation, given, frame)
        if (solver := solver_of(equation)) is not None and (places := solver_operands(equation)):
            # Nothing inside has a place where a constraint could be put.
            return self._expanded(solver, [given[at] for at in places], equation, frame, backward)
        bodies = list(core.jaxprs_in_params(equation.params))
        if name == "shard_map":
            # A constraint cannot be put into what each device does.
            if len(bodies) == 1 and _is_of_one_device(equation):
                return self._expanded(bodies[0], given, equation, frame, backward, is_shown=True)
        elif len(bodies) == 1:
            body = opened_jaxpr(bodies[0])
            fits = [shape_of(var) for var in body.invars] == [
                shape_of(var) for var in equation.invars
            ] and len(body.outvars) == len(equation.outvars)
            if fits:
                inner = self._inside(number, equation, body, frame, backward)
                made = self.program(body, given, inner)
                for result, variable in zip(body.outvars, equation.outvars, strict=True):
                    product = _product_behind(result, inner) if frame.loop.number else None
                    if product is not None:
                        frame.products[variable] = product
                return made
        if (expansion := expansion_of(equation)) is not None:
            return self._expanded(expansion, given, equation, frame, backward)
        return self._unknown(equation, given)

    def _expanded(
        self,
        expansion: Any,
        given: Sequence[WalkedArray],
        equation: Any,
        frame: _Frame,
        backward: bool,
        *,
        is_shown: bool = False,
    ) -> list[WalkedArray]:
        """Walks what one operation stands for. Nothing inside has a place in the program, where a
        constraint could be put.

        Args:
          is_shown: whether the user wrote it, so that lookups inside say what tables are.
        """
        events = self.events
        placed = (events.draws, events.divisions, events.meetings)
        known = [len(those) for those in placed]
        looked = len(events.lookups)
        inner = _Frame(
            is_backward=backward,
            is_differentiated=frame.is_differentiated or is_differentiated(equation),
            loop=frame.loop,
        )
        made = self.program(opened_jaxpr(expansion), given, inner)
        for those, count in zip(placed, known, strict=True):
            del those[count:]
        inside = [replace(one, place=None) for one in events.lookups[looked:] if is_shown]
        events.lookups[looked:] = inside
        return made

    def _inside(
        self,
        number: int,
        equation: Any,
        body: Any,
        frame: _Frame,
        backward: bool,
        loop: Loop | None = None,
    ) -> _Frame:
        bodies = [opened_jaxpr(one) for one in core.jaxprs_in_params(equation.params)]
        which = next((place for place, one in enumerate(bodies) if one is body), 0)
        return _Frame(
            path=(*frame.path, number),
            bodies=(*frame.bodies, which),
            is_backward=backward,
            is_differentiated=frame.is_differentiated or is_differentiated(equation),
            loop=loop or frame.loop,
        )

    def _simple(
        self,
        number: int,
        equation: Any,
        given: Sequence[WalkedArray],
        frame: _Frame,
        backward: bool,
    ) -> list[WalkedArray]:
        name = equation.primitive.name
        known = len(self.events.products)
        operation = TracedOperation(
            name=name,
            params=equation.params,
            ins=tuple(value.dims for value in given),
            given=tuple(shape_of(var) for var in equation.invars),
            shapes=tuple(shape_of(var) for var in equation.outvars),
            made=tuple(value.made for value in given),
            is_backward=backward,
            is_differentiated=frame.is_differentiated or is_differentiated(equation),
            loop=frame.loop,
            place=lambda: EquationPlace(path=(*frame.path, number), bodies=frame.bodies),
            held=tuple(value.is_held for value in given),
            sources=tuple(value.source for value in given),
            is_float=_is_float(equation.outvars),
            all=self.all,
            events=self.events,
        )
        try:
            found = RULES[name](operation)
        except _OTHER_PARAMETERS:
            # Another version of jax has other parameters here: treated like an unknown operation.
            return self._unknown(equation, given)
        if [len(dims) for dims in found] != [len(shape) for shape in operation.shapes]:
            return self._unknown(equation, given)
        made = arrays.made_of(operation)
        self._note_moves(operation)
        if operation.is_float:
            self.events.meetings += arrays.meetings_of(operation, found[0])
        held = name in _SAME_ARRAY and all(
            value.is_held for value, shape in zip(given, operation.given, strict=True) if shape
        )
        if not backward and made & ~ArrayOrigin.STATE:
            for output, dims in enumerate(found):
                self._note_division(operation, dims, output)
        if name in _WRITES_INTO and not backward and not made & ArrayOrigin.STATE:
            held = given[0].is_held
        if name == "broadcast_in_dim" and not operation.given[0] and operation.shapes[0]:
            frame.equal[equation.outvars[0]] = number
            held = False
        if backward:
            made |= ArrayOrigin.GRADIENT if made else ArrayOrigin(0)  # Zeros are made of nothing.
            for dims in found:
                self.events.backward.update(dims)
        # Micro-batches are summed in the forward pass of their loop.
        if frame.loop.number and (backward or name in _SUMS):
            frame.makers.update(dict.fromkeys(equation.outvars, equation))
            if len(self.events.products) > known:
                frame.products[equation.outvars[0]] = self.events.products[-1]
        sources = self._sources(equation, operation, found)
        return [
            WalkedArray(dims, made, held, source)
            for dims, source in zip(found, sources, strict=True)
        ]

    def _note_moves(self, operation: TracedOperation) -> None:
        """Records marks of elements that move; those of a backward pass mirror the forward one."""
        moved = self.all.moved()
        for dim, marks in () if operation.is_backward else moved:
            self.events.moves.append(
                Move(
                    dim=dim,
                    marks=marks,
                    is_of_data=not operation.together() & ArrayOrigin.STATE,
                    number=self.events.equations,
                    loop=operation.loop,
                )
            )

    def _note_division(self, operation: TracedOperation, found: Dims, output: int) -> None:
        """Records where data are divided: by a reshape, or by slices."""
        given, shape = operation.given[0], operation.shapes[output]
        dims = found
        if operation.name in _CUTS and not operation.made[0] & ArrayOrigin.STATE:
            dims = tuple(
                dim if size != kept else ()
                for dim, size, kept in zip(found, given, shape, strict=True)
            )
        elif operation.name != "reshape" or _several(given) >= _several(shape):
            return
        if any(dims):
            self.events.divisions.append(
                Division(
                    dims=dims,
                    shape=shape,
                    place=operation.place(),
                    output=output,
                    is_slice=operation.name in _CUTS,
                )
            )

    def source(self, variable: Any, shape: Shape) -> Source:
        """Makes a new source for an array of integers."""
        if not shape or not _is_integer(variable):
            return ()
        self._sources_known += 1
        return (self._sources_known,)

    def _begun(
        self, equation: Any, operation: TracedOperation, made: Sequence[Dims]
    ) -> list[Source]:
        """Returns the sources of positions that begin with an operation; none if it gives none."""
        name, events = operation.name, self.events
        none: list[Source] = [()] * len(operation.shapes)
        if name in _PLACES and events.places:
            self._sources_known += 1
            events.chosen[self._sources_known] = [events.places.pop()]
            # Of each row the places of the largest ones, or of the largest one.
            kept = made[1][int(equation.params.get("axis", -1))] if "top_k" in name else ()
            events.ranked[self._sources_known] = kept
            return [*none[1:], (self._sources_known,)]
        if name == "iota" and len(operation.shapes[0]) == 1:
            self._sources_known += 1
            events.positions[self._sources_known] = made[0][0]
            return [(self._sources_known,)]
        # All positions in the order of given data; what the step draws makes other rows of them.
        own = [one for one in operation.sources if len(one) == 1 and one[0] in events.positions]
        if name == "sort" and len(own) == 1 and operation.together() == ArrayOrigin.DATA:
            self._sources_known += 1
            events.ordered[self._sources_known] = events.positions[own[0][0]]
            events.computed.add(self._sources_known)
            return [(self._sources_known,) if one == own[0] else () for one in operation.sources]
        return []

    def _sources(
        self, equation: Any, operation: TracedOperation, made: Sequence[Dims]
    ) -> list[Source]:
        name, outvars = operation.name, equation.outvars
        none: list[Source] = [()] * len(outvars)
        if begun := self._begun(equation, operation, made):
            return begun
        if not _is_integer(outvars[0]):
            return none
        different = {source for source in operation.sources if source}
        columns = next(iter(different)) if len(different) == 1 else ()
        source = columns[0] if len(columns) == 1 else 0
        positions = self.events.positions
        if (stride := _stride(equation)) > 1 and source in positions:
            self._sources_known += 1
            positions[self._sources_known] = positions[source]
            self.events.strides[self._sources_known] = stride * self.events.strides.get(source, 1)
            return [(self._sources_known,)]
        is_same = (
            name in _SAME_INTEGERS
            # An offset is subtracted; a difference of two places is a new integer.
            or (name == "sub" and bool(operation.sources[0]) and not operation.sources[1])
            or (name == "sort" and len(outvars) == 1 and source not in positions)
        )
        if not is_same:  # New integers, such as drawn places of rows.
            new = [self.source(*one) for one in zip(outvars, operation.shapes, strict=True)]
            self.events.computed.update(number for source in new for number in source)
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
            if name == "add" and own & positions.keys() - self.events.strides.keys():
                self.events.windows.update(joined)
            begins = own & self.events.strides.keys()
            if name == "add" and joined and len(begins) == 1:
                self.events.offsets[joined[0]] = next(iter(begins))
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
            self._sources_known += 1
            self._together[numbers] = self._sources_known
        return (self._together[numbers],)

    def _picked(self, source: Source, equation: Any, number: int) -> Source:
        if len(source) != 1:
            return ()
        key = (source[0], str(equation.params.get("start_indices", number)))
        if key not in self._picks:
            self._sources_known += 1
            self._picks[key] = self._sources_known
        return (self._picks[key],)

    # Control flow.

    def _scan(
        self,
        number: int,
        equation: Any,
        given: Sequence[WalkedArray],
        frame: _Frame,
        backward: bool,
    ) -> list[WalkedArray]:
        body, constants, carried = loop_body(equation)
        turns = int(equation.params["length"])
        step = self.all.new(turns, DimensionMark.WALKED)
        inner = self._turn(number, equation, body, frame, backward, turns)
        rest = given[constants + carried :]
        together = _together(given)
        slices: list[WalkedArray] = []
        for value in rest:
            self.all.join(step, value.dims[0])
            slices.append(WalkedArray(value.dims[1:], value.made, source=value.source))
        # A value that passes through stacked layers is no state of a time loop.
        is_through_layers = any(value.made == ArrayOrigin.STATE and value.dims for value in rest)
        first = given[constants : constants + carried]
        # A backward pass carries gradients, which each of a batch may have for itself.
        begins = equation.invars[constants : constants + carried]
        is_noted = not is_through_layers and not backward
        carry = self._carry(begins, first, together, is_noted=is_noted)
        self._begin(begins, carry, frame)
        made = self.program(body, [*given[:constants], *carry, *slices], inner)
        for before, after in zip(carry, made[:carried], strict=True):
            self.all.join_all(before.dims, after.dims)
        sums = self._note_sums(body, constants, carried, turns, inner)
        walk = Walk(
            dim=step, turns=turns, is_forward=not backward, sums_gradients=sums and not backward
        )
        self.events.walks.append(walk)
        return [
            *(WalkedArray(value.dims, together) for value in carry),
            *(WalkedArray((step, *value.dims), value.made) for value in made[carried:]),
        ]

    def _while(
        self,
        number: int,
        equation: Any,
        given: Sequence[WalkedArray],
        frame: _Frame,
        backward: bool,
    ) -> list[WalkedArray]:
        params = equation.params
        before, inside = params["cond_nconsts"], params["body_nconsts"]
        body, test = opened_jaxpr(params["body_jaxpr"]), opened_jaxpr(params["cond_jaxpr"])
        inner = self._turn(number, equation, body, frame, backward, 1)
        begins = equation.invars[before + inside :]
        carry = self._carry(begins, given[before + inside :], _together(given))
        self._begin(begins, carry, frame)
        made = self.program(body, [*given[before : before + inside], *carry], inner)
        for first, after in zip(carry, made, strict=True):
            self.all.join_all(first.dims, after.dims)
        around = self._inside(number, equation, test, frame, backward, inner.loop)
        self.program(test, [*given[:before], *carry], around)
        return carry

    def _turn(
        self, number: int, equation: Any, body: Any, frame: _Frame, backward: bool, turns: int
    ) -> _Frame:
        self._loops += 1
        loop = Loop(turns=frame.loop.turns * turns, number=self._loops)
        return self._inside(number, equation, body, frame, backward, loop)

    def _carry(
        self,
        variables: Sequence[Any],
        given: Sequence[WalkedArray],
        together: ArrayOrigin,
        *,
        is_noted: bool = True,
    ) -> list[WalkedArray]:
        # In later turns a carried value may be made of all inputs of the loop.
        if is_noted:
            for value in given:
                noted = self.events.copies if _is_copied(value) else self.events.carried
                noted.append(value.dims)
        return [
            WalkedArray(value.dims, together, source=self._counted(var, value))
            for var, value in zip(variables, given, strict=True)
        ]

    def _counted(self, variable: Any, value: WalkedArray) -> Source:
        """Makes a source for a whole number that a loop carries: the number of its turn, by which
        it takes one of several layers."""
        if value.dims or not _is_integer(variable):
            return ()
        self._sources_known += 1
        return (self._sources_known,)

    def _begin(self, variables: Sequence[Any], carry: Sequence[WalkedArray], frame: _Frame) -> None:
        """Records carried values that begin as equal numbers, since nothing determines their
        split."""
        for var, value in zip(variables, carry, strict=True):
            if not is_literal(var) and var in frame.equal:
                place = EquationPlace(path=(*frame.path, frame.equal[var]), bodies=frame.bodies)
                self.events.draws.append(
                    Draw(dims=value.dims, shape=shape_of(var), place=place, is_random=False)
                )

    def _note_sums(
        self, body: Any, constants: int, carried: int, turns: int, frame: _Frame
    ) -> bool:
        """Records products of a backward pass that a loop adds to a carried value in each turn;
        returns whether there is one."""
        any_found = False
        for place, result in enumerate(body.outvars[:carried]):
            own = body.invars[constants + place]
            is_added = any(variable is own for variable in _summands(result, frame))
            found = _product_behind(result, frame) if is_added else None
            if found is not None and not found.is_forward:
                any_found = True
                self.events.in_loops.append((found, math.prod(shape_of(result)), turns))
        return any_found

    def _cond(
        self,
        number: int,
        equation: Any,
        given: Sequence[WalkedArray],
        frame: _Frame,
        backward: bool,
    ) -> list[WalkedArray]:
        found: list[WalkedArray] = []
        for branch in equation.params["branches"]:
            body = opened_jaxpr(branch)
            inner = self._inside(number, equation, body, frame, backward)
            made = self.program(body, given[1:], inner)
            if not found:
                found = made
                continue
            for mine, yours in zip(found, made, strict=True):
                self.all.join_all(mine.dims, yours.dims)
            found = [
                WalkedArray(mine.dims, mine.made | yours.made)
                for mine, yours in zip(found, made, strict=True)
            ]
        return found

    def _reference(
        self, name: str, equation: Any, given: Sequence[WalkedArray], frame: _Frame
    ) -> list[WalkedArray]:
        """Follows reads and writes of a whole mutable array; those of a part count as unknown
        operations."""
        first = given[0]
        shapes = [shape_of(var) for var in equation.outvars]
        whole = shape_of(equation.invars[0])
        if name in _WRITES:
            if shape_of(equation.invars[1]) == whole:
                self.all.join_all(first.dims, given[1].dims)
            made = first.made | given[1].made
            if not is_literal(equation.invars[0]):
                frame.known[equation.invars[0]] = WalkedArray(first.dims, made)
        found: list[WalkedArray] = []
        for shape in shapes:
            dims = first.dims if shape == whole else self.all.news(shape, DimensionMark.UNKNOWN)
            found.append(WalkedArray(dims, first.made))
        return found

    def _unknown(self, equation: Any, given: Sequence[WalkedArray]) -> list[WalkedArray]:
        name = equation.primitive.name
        # An operation without results only shows something.
        if equation.outvars:
            self.events.unknown[name] = self.events.unknown.get(name, 0) + 1
            for value in given:
                for dim in value.dims:
                    self.all.mark(dim, DimensionMark.UNKNOWN)
        made = _together(given)
        return [
            WalkedArray(self.all.news(shape_of(var), DimensionMark.UNKNOWN), made)
            for var in equation.outvars
        ]


def _summands(result: Any, frame: _Frame) -> list[Any]:
    """Returns the variables that are added up to a value; the value alone if it is no sum."""
    rest, found = [result], list[Any]()
    while rest and len(found) < _MOST_BEHIND:
        variable = rest.pop()
        maker = None if is_literal(variable) else frame.makers.get(variable)
        if maker is not None and maker.primitive.name in _SUMS:
            rest += maker.invars
        else:
            found.append(variable)
    return found


def _product_behind(variable: Any, frame: _Frame) -> Contraction | None:
    """Returns the product that a value is made of; of several that are added up, as of weights that
    are used twice in a turn, one."""
    for one in _summands(variable, frame):
        for _ in range(_MOST_BEHIND):
            if is_literal(one):
                break
            if one in frame.products:
                return frame.products[one]
            maker = frame.makers.get(one)
            if maker is None or maker.primitive.name not in _UNARY:
                break
            one = maker.invars[0]
    return None


def _join_chosen(every: Dimensions, events: Events) -> None:
    """Joins dimensions in which the same integers choose: a vocabulary, in the table and in the
    head."""
    for dims in events.chosen.values():
        by_size: dict[int, Dim] = {}
        for dim in dims:
            first = by_size.setdefault(every.size_of(every.factors(dim)), dim)
            every.join(first, dim)


def _several(shape: Shape) -> int:
    return sum(size > 1 for size in shape)


def _is_integer(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"


def _is_of_one_device(equation: Any) -> bool:
    """Whether a `shard_map` has a mesh of one device."""
    return int(getattr(equation.params.get("mesh"), "size", 0)) == 1


def _stride(equation: Any) -> int:
    """Returns the number that an equation multiplies integers by; 0 if it is no such equation."""
    if equation.primitive.name != "mul":
        return 0
    numbers = [var.val for var in equation.invars if is_literal(var) and not shape_of(var)]
    return int(numbers[0]) if len(numbers) == 1 else 0


def _is_float(variables: Sequence[Any]) -> bool:
    dtype = getattr(variables[0].aval, "dtype", None) if variables else None
    return dtype is not None and bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def _is_copied(value: WalkedArray) -> bool:
    """Whether a carried value begins as a matrix of parameters for each of a batch: a loop of inner
    steps trains it, and it is no state of a recurrent network."""
    return value.made == ArrayOrigin.STATE and sum(map(bool, value.dims)) > 2


def _together(values: Sequence[WalkedArray]) -> ArrayOrigin:
    made = ArrayOrigin(0)
    for value in values:
        made |= value.made
    return made
