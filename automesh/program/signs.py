"""Which arguments of a step must be positive to make sense, read off the traced program (jax).

Synthetic values should have both signs, as weights do: a network of positive weights computes
nearly the same loss whatever one does to it, and hides wrong numerics. But a negative second moment
under a square root, or a mask whose sum passes through zero in a denominator, breaks a step. So
follow each operand of a square root, a logarithm, a power or a denominator back to the arguments;
what reaches an argument without passing through something that makes it positive (a square, an
exponential) or that mixes it (a matrix product) makes it positive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

# Primitive -> which operand must not be negative, or near zero.
_SENSITIVE = {
    "sqrt": 0,
    "rsqrt": 0,
    "log": 0,
    "log1p": 0,
    "pow": 0,
    "div": 1,
    "lgamma": 0,
    "digamma": 0,
}
# What comes out does not take its sign from what goes in.
_STOPS = frozenset(
    "exp exp2 abs square logistic cosh erfc dot_general conv_general_dilated sign argmax argmin iota eq ne lt le "
    "gt ge is_finite random_bits random_wrap cholesky eigh svd qr triangular_solve ragged_dot "
    "ragged_dot_general".split()
)
# Operands that choose elements rather than being passed on.
_DATA_OPERANDS = {"gather": (0,), "dynamic_slice": (0,), "get": (0,)}


def must_be_positive(traced: jax.stages.Traced) -> tuple[bool, ...]:
    """Per leaf of (args, kwargs), whether only positive values are safe."""
    closed: Any = traced.jaxpr
    positive = _positive_inputs(closed.jaxpr, [False] * len(closed.jaxpr.outvars))
    # Constants that jax has lifted into arguments come first.
    return tuple(positive[len(positive) - traced.in_tree.num_leaves :])


def _positive_inputs(jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """Per input of `jaxpr`, whether it must be positive, given which outputs must be."""
    marked = {id(var) for var, needed in zip(jaxpr.outvars, outputs, strict=True) if needed}
    # References are written after they are read: go round until nothing changes.
    while True:
        before = len(marked)
        for equation in reversed(jaxpr.eqns):
            _mark_operands(equation, marked)
        if len(marked) == before:
            return [id(var) in marked for var in jaxpr.invars]


def _mark_operands(equation: Any, marked: set[int]) -> None:
    name = equation.primitive.name
    wanted = [id(var) in marked for var in equation.outvars]
    if bodies := _bodies(equation):
        needed = _through(equation, bodies, wanted)
    else:
        needed = [False] * len(equation.invars)
        if (sensitive := _SENSITIVE.get(name)) is not None:
            needed[sensitive] = True
        if any(wanted) and not _stops(equation):
            for position in _DATA_OPERANDS.get(name, range(len(needed))):
                needed[position] = True
        if name in ("swap", "addupdate") and id(equation.invars[0]) in marked:
            needed[1] = True
    marked.update(
        id(var)
        for var, need in zip(equation.invars, needed, strict=True)
        if need and _is_variable(var)
    )


def _stops(equation: Any) -> bool:
    name = equation.primitive.name
    if name == "integer_pow":
        return equation.params["y"] % 2 == 0
    same = name == "mul" and equation.invars[0] is equation.invars[1]
    return same or name in _STOPS


def _is_variable(var: Any) -> bool:
    return not hasattr(var, "val")


def _bodies(equation: Any) -> list[Any]:
    """The open jaxprs that the equation runs."""
    found: list[Any] = []
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found


def _through(equation: Any, bodies: Sequence[Any], wanted: Sequence[bool]) -> list[bool]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return _loop(bodies[0], wanted, params["num_consts"], params["num_carry"])
    if name == "while":
        cond_consts = params["cond_nconsts"]
        body = params["body_jaxpr"].jaxpr
        inner = _loop(body, wanted, params["body_nconsts"], len(wanted))
        return [False] * cond_consts + inner
    if name == "cond":
        branches = [_positive_inputs(body, wanted) for body in bodies]
        return [False, *(any(column) for column in zip(*branches, strict=True))]
    body = bodies[0]
    if len(body.invars) == len(equation.invars) and len(body.outvars) == len(wanted):
        return _positive_inputs(body, wanted)
    # A call that we do not know: whatever goes in may come out.
    return [any(wanted)] * len(equation.invars)


def _loop(body: Any, wanted: Sequence[bool], constants: int, carried: int) -> list[bool]:
    """Marks what is carried until its inputs ask for no more than its outputs."""
    outputs = list(wanted)
    while True:
        inputs = _positive_inputs(body, outputs)
        again = [old or new for old, new in zip(outputs, inputs[constants : constants + carried])]
        if again == outputs[:carried]:
            return inputs
        outputs[:carried] = again
