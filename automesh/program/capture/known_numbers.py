"""Computes whole numbers and truth values that are known though arrays have no data, and arrays
that are made of small ones (jax).

A jitted `init` makes the counter of an optimizer without any input, and each step adds one to it.
The few operations that make such a number are kept, and are run when the script asks for the
number.

A single floating number without data, such as a loss, is nan to a script that compares it, and
finite to one that asks whether it is, see `unread`.

Private in jax: `partial_eval.dce_jaxpr`, which reduces a program to what one of its outputs needs.
Checked with jax 0.10.1 to 0.12.0.1.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core

from automesh.program.capture.unread import is_unread_number

_TRACER: Any = importlib.import_module("jax._src.core").Tracer
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
# The most elements of an intermediate value.
_MOST_ELEMENTS = 2**10
_DEEPEST = 50
# Parameters that only state where a value is; a number is computed without them.
_PLACES = ("sharding", "out_sharding")
_MOVES = frozenset({"sharding_constraint", "reshard", "mesh_cast", "device_put", "copy"})
# Comparisons that do not hold if one of the numbers is nan.
_COMPARISONS = frozenset({"eq", "lt", "le", "gt", "ge"})


@dataclass(slots=True, kw_only=True)
class _Counter:
    count: int = 0


# Of numbers without data, in this process.
_COMPARISONS_MADE = _Counter()


class _NotThere(Exception):
    """The error that a number depends on data that are not there."""


class _Unread:
    """A single floating number without data. Two of them are one number if they are one object."""


@dataclass(slots=True)
class KnownNumber:
    """A whole number, a truth value or a small array, with the operations that make it; it is
    computed when somebody first asks for it.

    Attributes:
      depth: length of the longest chain of other numbers that it is made of.
      reads_nan: whether it is made of floating numbers without data.
      compares: whether such a number was compared to compute it; a question whether one is finite
        is no comparison.
      parts: the numbers that it is made of, until it is computed.
    """

    make: Callable[[], Any] | None
    depth: int = 0
    reads_nan: bool = False
    compares: bool = False
    parts: tuple[KnownNumber, ...] = ()
    _value: Any = field(default=None)

    def value(self) -> Any:
        """Returns the number as a NumPy array, or as an array of random keys, computed at the first
        call; None if it depends on data that are not there."""
        if self.make is not None:
            before = _COMPARISONS_MADE.count
            try:
                made = self.make()
                is_key = jax.dtypes.issubdtype(made.dtype, jax.dtypes.extended)
                self._value = made if is_key else np.asarray(made)
            except _NotThere:
                self._value = None
            self.compares = _COMPARISONS_MADE.count > before or any(
                part.compares for part in self.parts
            )
            self.make, self.parts = None, ()
        return self._value


def is_countable(aval: Any) -> bool:
    """Whether a value is a single whole number or truth value."""
    dtype = getattr(aval, "dtype", None)
    return (
        dtype is not None
        and getattr(aval, "shape", None) == ()
        and (jax.numpy.issubdtype(dtype, np.integer) or dtype == np.bool_)
    )


def numbers_of(
    primitive: Any,
    args: Sequence[Any],
    params: dict[str, Any],
    outs: Sequence[Any],
    known: Callable[[Any], KnownNumber | None],
) -> list[KnownNumber | None]:
    """Returns, for each result of an operation, the number that it is; None where that is not
    known.

    Args:
      outs: shapes and types of the results.
      known: returns the number of an argument without data, or None.
    """
    found: list[KnownNumber | None] = [None] * len(outs)
    for place, aval in enumerate(outs):
        if not is_countable(aval):
            continue
        if primitive.name in _CALLS:
            found[place] = _of_program(params["jaxpr"], place, args, known)
        elif not any(True for _ in core.jaxprs_in_params(params)):
            values = _all_given(args, known)
            if all(value is not None for value in values):
                found[place] = _number(_Operation(primitive, params, values, outs, place), values)
    return found


def numbers_of_whole(
    primitive: Any,
    args: Sequence[Any],
    params: dict[str, Any],
    outs: Sequence[Any],
    known: Callable[[Any], KnownNumber | None],
) -> list[KnownNumber]:
    """Returns the results of an operation all of whose arguments are known; all are computed when
    somebody asks for one of them, as for an order in which a data set is shuffled."""
    values = [known(arg) or arg for arg in args]
    whole = _Whole(primitive, params, values)
    return [_number(partial(whole.result, place), values) for place in range(len(outs))]


@dataclass(slots=True)
class _Whole:
    primitive: Any
    params: dict[str, Any]
    values: Sequence[Any]
    results: list[Any] | None = None

    def result(self, place: int) -> Any:
        if self.results is None:
            values = list(map(_value, self.values))
            # A later operation may have taken an argument for its own result.
            if any(isinstance(value, jax.Array) and value.is_deleted() for value in values):
                raise _NotThere
            made = self.primitive.bind(*values, **self.params)
            self.results = list(made) if self.primitive.multiple_results else [made]
            self.values = ()
        return self.results[place]


def _number(make: Callable[[], Any], values: Sequence[Any]) -> KnownNumber:
    depths = [one.depth for one in values if isinstance(one, KnownNumber) and one.make is not None]
    reads_nan = any(
        one.reads_nan if isinstance(one, KnownNumber) else isinstance(one, _Unread)
        for one in values
    )
    parts = tuple(one for one in values if isinstance(one, KnownNumber))
    number = KnownNumber(make, 1 + max(depths, default=0), reads_nan, parts=parts)
    # A counter that nobody asks for is made of the counter of the step before, and so on.
    if number.depth > _DEEPEST:
        number.value()
    return number


@dataclass(frozen=True, slots=True)
class _Operation:
    primitive: Any
    params: dict[str, Any]
    values: Sequence[Any]
    outs: Sequence[Any]
    place: int

    def __call__(self) -> Any:
        values = list(map(_value, self.values))
        return _done(self.primitive, self.params, values, self.outs)[self.place]


@dataclass(frozen=True, slots=True)
class _Program:
    jaxpr: Any
    values: Sequence[Any]

    def __call__(self) -> Any:
        return _evaluated(self.jaxpr, list(map(_value, self.values)))[0]


def _of_program(
    jaxpr: Any, place: int, args: Sequence[Any], known: Callable[[Any], KnownNumber | None]
) -> KnownNumber | None:
    part, used = _cut(jaxpr, place)
    if not _is_small(part):
        return None
    constants = list(getattr(jaxpr, "consts", ()))
    if constants:
        return None
    needed = [arg for arg, is_used in zip(args, used, strict=True) if is_used]
    values = _all_given(needed, known)
    if any(value is None for value in values):
        return None
    return _number(_Program(part, values), values)


def _cut(jaxpr: Any, place: int) -> tuple[Any, list[bool]]:
    """Returns the part of a program that one output needs, and which inputs this part uses."""
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    key = (id(opened), place)
    if key not in _CUT:
        cut: Any = importlib.import_module("jax._src.interpreters.partial_eval").dce_jaxpr
        wanted = [number == place for number in range(len(opened.outvars))]
        part, used = cut(opened, wanted)
        # The program itself is kept, too, so that its `id` is not used twice.
        _CUT[key] = (opened, part, list(used))
    _, part, used = _CUT[key]
    return part, used


_CUT: dict[tuple[int, int], tuple[Any, Any, list[bool]]] = {}


def _is_small(jaxpr: Any) -> bool:
    for equation in jaxpr.eqns:
        sizes = [math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars]
        if max(sizes, default=0) > _MOST_ELEMENTS or equation.effects:
            return False
        bodies = list(core.jaxprs_in_params(equation.params))
        if bodies and equation.primitive.name not in _CALLS:
            return False
        if not all(_is_small(getattr(body, "jaxpr", body)) for body in bodies):
            return False
    return True


def _all_given(args: Sequence[Any], known: Callable[[Any], KnownNumber | None]) -> list[Any]:
    """Returns the arguments whose values are known or can be computed; None for others."""
    unread: dict[int, _Unread] = {}
    return [_given(arg, known, unread) for arg in args]


def _given(arg: Any, known: Callable[[Any], KnownNumber | None], unread: dict[int, _Unread]) -> Any:
    number = known(arg)
    if number is not None:
        return number
    if is_unread_number(arg) or (isinstance(arg, _TRACER) and _is_floating(arg.aval)):
        return unread.setdefault(id(arg), _Unread())
    if not isinstance(arg, (jax.Array, np.ndarray, np.generic, int, float)):
        return None
    is_there = not isinstance(arg, _TRACER) and np.size(arg) <= _MOST_ELEMENTS
    return arg if is_there else None


def _is_floating(aval: Any) -> bool:
    """Whether a value is a single floating number."""
    dtype = getattr(aval, "dtype", None)
    is_single = getattr(aval, "shape", None) == ()
    return dtype is not None and is_single and jax.numpy.issubdtype(dtype, np.floating)


def _value(given: Any) -> Any:
    if not isinstance(given, KnownNumber):
        return given
    value = given.value()
    if value is None:
        raise _NotThere
    return value


def _evaluated(jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))

    def of(variable: Any) -> Any:
        return variable.val if hasattr(variable, "val") else known[variable]

    for equation in jaxpr.eqns:
        given = [of(variable) for variable in equation.invars]
        outs = [variable.aval for variable in equation.outvars]
        made = _done(equation.primitive, equation.params, given, outs)
        known.update(zip(equation.outvars, made, strict=True))
    return [of(variable) for variable in jaxpr.outvars]


def _done(
    primitive: Any, params: dict[str, Any], values: Sequence[Any], outs: Sequence[Any]
) -> list[Any]:
    if primitive.name in _CALLS:
        body = params["jaxpr"]
        return _evaluated(getattr(body, "jaxpr", body), values)
    if primitive.name in _MOVES:
        return list(values)
    if any(isinstance(value, _Unread) for value in values):
        return _of_unread(primitive.name, values, outs)
    plain = {key: None if key in _PLACES else value for key, value in params.items()}
    made = primitive.bind(*values, **plain)
    return list(made) if primitive.multiple_results else [made]


def _of_unread(name: str, values: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """Returns the results of an operation on numbers without data: those of nan, but that they are
    finite, and equal to themselves."""
    if name == "is_finite":
        return [np.asarray(True)]
    if name == "ne":  # So `isnan` asks.
        return [np.asarray(values[0] is not values[1])]
    if name in _COMPARISONS:
        _COMPARISONS_MADE.count += 1
        return [np.asarray(False)]
    if not all(map(_is_floating, outs)):
        raise _NotThere
    return [_Unread() for _ in outs]
