"""Puts sharding constraints into a traced program, at arrays without names (jax).

A constraint is an equation after the one that makes the array; all later equations use its result.
A constraint of an operand comes before its equation, and only that one uses its result. The
equation itself is what jax traces for `with_sharding_constraint`. All names are public but for the
constructor of an equation, `jax.extend.core.new_jaxpr_eqn` (jax 0.10.1 to 0.12.0.1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
from jax.extend import core
from jax.sharding import NamedSharding

from automesh.errors import UsageError

Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Numbers of equations, outermost first; which of their programs; the output of the last one, or -1
for its first operand."""


class OtherProgram(UsageError):
    """A program has no equation at a place, or another one than expected."""


def constrained(program: Any, constraints: Mapping[Place, NamedSharding]) -> Any:
    """Adds constraints to a closed jaxpr; returns it unchanged if there are none.

    Raises:
      OtherProgram: it has no such place.
    """
    if not constraints:
        return program
    inner = _constrained(program.jaxpr, [(*place, to) for place, to in constraints.items()])
    return core.ClosedJaxpr(inner, program.consts)


_Wanted = tuple[tuple[int, ...], tuple[int, ...], int, NamedSharding]


def _constrained(jaxpr: Any, wanted: Sequence[_Wanted]) -> Any:
    by_number: dict[int, list[_Wanted]] = defaultdict(list)
    for path, bodies, output, to in wanted:
        if not path or path[0] >= len(jaxpr.eqns):
            raise OtherProgram(f"the step has no equation {path}", hint="search it again")
        by_number[path[0]].append((path[1:], bodies, output, to))
    renamed: dict[Any, Any] = {}
    equations: list[Any] = []
    for number, equation in enumerate(jaxpr.eqns):
        taken = [_new(renamed, one) for one in equation.invars]
        equation = equation.replace(invars=taken) if taken != equation.invars else equation
        deeper: dict[int, list[_Wanted]] = defaultdict(list)
        here: list[_Wanted] = []
        for path, bodies, output, to in by_number.get(number, ()):
            if path:
                deeper[bodies[0] if bodies else 0].append((path, bodies[1:], output, to))
            else:
                here.append((path, bodies, output, to))
        if deeper:
            equation = equation.replace(params=_with_bodies(equation.params, deeper))
        for _, _, output, to in here:
            if output < 0:
                constraint = _constraint(equation.invars[-1 - output], to)
                equations.append(constraint)
                operands = list(equation.invars)
                operands[-1 - output] = constraint.outvars[0]
                equation = equation.replace(invars=operands)
        equations.append(equation)
        for _, _, output, to in here:
            if output < 0:
                continue
            made = equation.outvars[output]
            constraint = _constraint(made, to)
            renamed[made] = constraint.outvars[0]
            equations.append(constraint)
    results = [_new(renamed, one) for one in jaxpr.outvars]
    return jaxpr.replace(eqns=equations, outvars=results)


def _new(renamed: Mapping[Any, Any], atom: Any) -> Any:
    return atom if isinstance(atom, core.Literal) else renamed.get(atom, atom)


def _constraint(variable: Any, to: NamedSharding) -> Any:
    """Returns the equation that jax traces for a constraint of an array."""
    equation = _traced(tuple(variable.aval.shape), variable.aval.dtype, to)
    made = core.Var(variable.aval)
    return equation.replace(invars=[variable], outvars=[made])


@lru_cache(maxsize=4096)  # Unrolled layers repeat the same arrays.
def _traced(shape: tuple[int, ...], dtype: Any, to: NamedSharding) -> Any:
    traced = jax.make_jaxpr(lambda array: jax.lax.with_sharding_constraint(array, to))(
        jax.ShapeDtypeStruct(shape, dtype)
    )
    return traced.jaxpr.eqns[0]


def _with_bodies(params: Mapping[str, Any], wanted: Mapping[int, Sequence[_Wanted]]) -> Any:
    """Returns the parameters of an equation with constraints in its programs, which are numbered in
    the order of `jax.extend.core.jaxprs_in_params`."""
    count = 0

    def changed(value: Any) -> Any:
        nonlocal count
        if isinstance(value, core.ClosedJaxpr):
            found = wanted.get(count)
            count += 1
            if not found:
                return value
            return core.ClosedJaxpr(_constrained(value.jaxpr, found), value.consts)
        if isinstance(value, core.Jaxpr):
            found = wanted.get(count)
            count += 1
            return _constrained(value, found) if found else value
        return value

    made = {
        name: tuple(map(changed, value)) if isinstance(value, tuple) else changed(value)
        for name, value in params.items()
    }
    missing = [number for number in wanted if number >= count]
    if missing:
        raise OtherProgram(f"the step has no program {missing[0]} there", hint="search it again")
    return made
