"""Walks a traced program once and joins the dimensions that must agree (jax).

Bodies of loops are walked once as well, since carried values have the same dimensions in all turns.
The time is proportional to the number of equations; those of called programs count at each call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
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
    MovedRows,
    Rule,
    Shape,
    Source,
    TracedOperation,
    Walk,
    shape_of,
)
from automesh.program.infer.rules import arrays, indexing, mapped, windows
from automesh.program.infer.sources import Sources

RULES: dict[str, Rule] = {**arrays.RULES, **indexing.RULES, **windows.RULES, **mapped.RULES}
# These operations on held arrays make no new data.
_SAME_ARRAY = arrays.ELEMENTWISE | {"reshape", "transpose", "squeeze", "broadcast_in_dim"}
# Rows that are written into a held array leave it one: a replay buffer, before rows are drawn.
_WRITES_INTO = frozenset({"scatter", "dynamic_update_slice"})
_OTHER_PARAMETERS = (KeyError, AttributeError, IndexError, TypeError, ValueError, StopIteration)
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


def walk(
    jaxpr: Any,
    inputs: Sequence[ArrayOrigin],
    *,
    num_held: int,
    constants: Mapping[Any, int] | None = None,
) -> Walked:
    """Walks a program.

    Args:
      inputs: origin of each input.
      num_held: number of leading inputs that are arrays of the step itself.
      constants: for variables of constants, also of programs inside, the array that each is: equal
        numbers are one array.
    """
    opened = opened_jaxpr(jaxpr)
    walker = _Walker(constants or {})
    values = [
        WalkedArray(
            walker.all.news(shape_of(var)),
            made,
            not made & ArrayOrigin.STATE,
            walker.sources.new(var, shape_of(var)),
        )
        for var, made in zip(opened.invars, inputs, strict=True)
    ]
    walker.know(opened.invars, values)
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
    def __init__(self, constants: Mapping[Any, int]) -> None:
        self._arrays_of = constants
        self._known_arrays: dict[int, WalkedArray] = {}
        self.all = Dimensions()
        self.events = Events()
        self._loops = 0
        self.sources = Sources(self.events)

    def program(
        self, jaxpr: Any, inputs: Sequence[WalkedArray], frame: _Frame
    ) -> list[WalkedArray]:
        """Walks a program with these inputs."""
        frame.known = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            frame.known[var] = self._constant(var)
        for number, equation in enumerate(jaxpr.eqns):
            self.events.equations += 1
            made = self._equation(number, equation, frame)
            frame.known.update(zip(equation.outvars, made, strict=True))
        return [self._value(var, frame) for var in jaxpr.outvars]

    def know(self, variables: Sequence[Any], values: Sequence[WalkedArray]) -> None:
        """Notes which of these values are constants, for the programs inside that hold them, too:
        a jitted function and its gradient are two programs."""
        for var, value in zip(variables, values, strict=True):
            if var in self._arrays_of:
                self._known_arrays.setdefault(self._arrays_of[var], value)

    def _constant(self, var: Any) -> WalkedArray:
        array = self._arrays_of.get(var)
        if array is not None and array in self._known_arrays:
            return self._known_arrays[array]
        shape = shape_of(var)
        made = WalkedArray(
            self.all.news(shape), ArrayOrigin.DATA, True, self.sources.new(var, shape)
        )
        self.know([var], [made])
        return made

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
        sources = self.sources.of(equation, operation, found)
        return [
            WalkedArray(dims, made, held, source)
            for dims, source in zip(found, sources, strict=True)
        ]

    def _note_moves(self, operation: TracedOperation) -> None:
        """Records marks of elements that move; those of a backward pass mirror the forward one."""
        moved = self.all.moved()
        for dim, marks in () if operation.is_backward else moved:
            self.events.moves.append(
                MovedRows(
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
            WalkedArray(value.dims, together, source=self.sources.counted(var, value.dims))
            for var, value in zip(variables, given, strict=True)
        ]

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


def _is_of_one_device(equation: Any) -> bool:
    """Whether a `shard_map` has a mesh of one device."""
    return int(getattr(equation.params.get("mesh"), "size", 0)) == 1


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
