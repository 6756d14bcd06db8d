"""Finds from a traced step which values its arguments may have (jax).

Synthetic floats should have both signs, as weights do: a network of positive weights computes
nearly the same loss whatever one does to it, and hides wrong numerics. But a negative second
moment under a square root, or a mask whose sum passes through zero in a denominator, breaks a
step. So each operand of a root, a logarithm, a power or a denominator is followed back to the
arguments. An argument gets positive values if it reaches such an operand without an operation
between that makes values positive (a square, an exponential) or mixes them (a matrix product). In
the same way, the sizes of looked-up dimensions limit integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from automesh.errors import AutomeshError

# Following demands on intermediate values of a traced program back to its arguments (jax).

# Parameters of traced equations whose names change between releases of jax (jax).


class UnknownLoop(AutomeshError):
    """This jax does not state how many values a loop carries."""


def scan_operands(equation: Any) -> tuple[int, int]:
    """Returns the numbers of constant and carried operands of a `scan`; the rest is sliced.

    Up to jax 0.10.2 the equation states both numbers; from 0.11 on it holds a tree of (constants,
    carried, sliced), which is read by filling the operands in.

    Raises:
      UnknownLoop: the equation has neither.
    """
    params = equation.params
    if "num_consts" in params and "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    tree: Any = params.get("ft_in")
    if hasattr(tree, "update") and hasattr(tree, "unpack"):
        groups = [list(group) for group in tree.update(list(equation.invars)).unpack()]
        if len(groups) == 3 and sum(map(len, groups)) == len(equation.invars):
            return len(groups[0]), len(groups[1])
    raise UnknownLoop(
        f"this jax does not say what a `scan` carries: its parameters are {', '.join(params)}",
        hint="return the initial arguments from `init`, or use a version that README names",
    )


# A demand on a value, as a number; the smaller of two demands counts. None is no demand.
Demand = float | None
# Equation and demands on its outputs -> demands on its operands.
Rule = Callable[[Any, Sequence[Demand]], Sequence[Demand]]


def demands_on_inputs(jaxpr: Any, outputs: Sequence[Demand], rule: Rule) -> list[Demand]:
    """Returns the demands on each input of a jaxpr.

    Args:
      jaxpr: an open one.
      outputs: the demands on each of its outputs.
      rule: gives the demands of an equation without a body on its operands.
    """
    asked: dict[int, float] = {}
    _add(asked, jaxpr.outvars, outputs)
    # References may be written after they are read, so repeat until nothing changes.
    while True:
        before = dict(asked)
        for equation in reversed(jaxpr.eqns):
            wanted = [asked.get(id(var)) for var in equation.outvars]
            bodies = list(core.jaxprs_in_params(equation.params))
            operands = (
                _through(equation, bodies, wanted, rule) if bodies else rule(equation, wanted)
            )
            _add(asked, equation.invars, operands)
            if equation.primitive.name in ("swap", "addupdate"):
                _add(asked, equation.invars[1:2], [asked.get(id(equation.invars[0]))])
        if asked == before:
            return [asked.get(id(var)) for var in jaxpr.invars]


def _add(asked: dict[int, float], variables: Sequence[Any], demands: Sequence[Demand]) -> None:
    for variable, demand in zip(variables, demands, strict=True):
        # Only literals have `val`.
        if demand is not None and not hasattr(variable, "val"):
            asked[id(variable)] = min(demand, asked.get(id(variable), demand))


def _through(
    equation: Any, bodies: Sequence[Any], wanted: Sequence[Demand], rule: Rule
) -> Sequence[Demand]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        constants, carried = scan_operands(equation)
        return _loop(bodies[0], wanted, constants, carried, rule)
    if name == "while":
        body, constants = params["body_jaxpr"].jaxpr, params["body_nconsts"]
        inner = _loop(body, wanted, constants, len(wanted), rule)
        return [*[None] * params["cond_nconsts"], *inner]
    if name == "cond":
        branches = [demands_on_inputs(body, wanted, rule) for body in bodies]
        return [None, *(least(column) for column in zip(*branches, strict=True))]
    body = bodies[0]
    if len(body.invars) == len(equation.invars) and len(body.outvars) == len(wanted):
        return demands_on_inputs(body, wanted, rule)
    # An unknown call: each operand may reach each output.
    return [least(wanted)] * len(equation.invars)


def _loop(
    body: Any, wanted: Sequence[Demand], constants: int, carried: int, rule: Rule
) -> list[Demand]:
    """Passes demands through a loop's body until those on its carried values no longer change."""
    outputs = list(wanted)
    while True:
        inputs = demands_on_inputs(body, outputs, rule)
        again = [least(pair) for pair in zip(outputs, inputs[constants : constants + carried])]
        if again == outputs[:carried]:
            return inputs
        outputs[:carried] = again


def least(demands: Sequence[Demand]) -> Demand:
    """Returns the strictest of several demands."""
    return min((demand for demand in demands if demand is not None), default=None)


# Primitive -> which operand must be neither negative nor near zero.
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
# The sign of the output does not follow from the sign of the operand.
_STOPS = frozenset(
    {
        *("exp", "exp2", "abs", "square", "logistic", "cosh", "erfc", "sign", "is_finite"),
        *("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"),
        *("eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "iota"),
        *("random_bits", "random_wrap", "cholesky", "eigh", "svd", "qr", "triangular_solve"),
    }
)
# Operands that hold data; the others are indices.
_DATA_OPERANDS = {"gather": (0,), "dynamic_slice": (0,), "get": (0,)}
# An index keeps its meaning through these; the first operand of `select_n` only chooses.
_SAME_INDEX = frozenset(
    {
        *("convert_element_type", "reshape", "broadcast_in_dim", "transpose", "squeeze", "copy"),
        *("expand_dims", "slice", "dynamic_slice", "concatenate", "rev", "add", "sub", "pad"),
        *("sharding_constraint", "reshard", "mesh_cast", "get", "all_gather", "pvary", "select_n"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """The possible values of one leaf.

    Attributes:
      positive: for floats, True if only positive values are safe.
      below: for integers, the limit that the step's look-ups set; None without one.
    """

    positive: bool = False
    below: int | None = None


def domains(traced: jax.stages.Traced) -> tuple[Domain, ...]:
    """Returns the domain of every leaf of (args, kwargs)."""
    closed: Any = traced.jaxpr
    nothing = [None] * len(closed.jaxpr.outvars)
    positive = demands_on_inputs(closed.jaxpr, nothing, _positive_operands)
    bounds = demands_on_inputs(closed.jaxpr, nothing, _index_operands)
    found = [
        Domain(positive=sign is not None, below=None if bound is None else int(bound))
        for sign, bound in zip(positive, bounds, strict=True)
    ]
    # Constants that jax has made arguments come first.
    return tuple(found[len(found) - traced.in_tree.num_leaves :])


def _positive_operands(equation: Any, wanted: Sequence[Demand]) -> list[Demand]:
    name = equation.primitive.name
    needed: list[Demand] = [None] * len(equation.invars)
    if (sensitive := _SENSITIVE.get(name)) is not None:
        needed[sensitive] = 0.0
    if least(wanted) is not None and not _stops(equation):
        for position in _DATA_OPERANDS.get(name, range(len(needed))):
            needed[position] = 0.0
    return needed


def _stops(equation: Any) -> bool:
    name = equation.primitive.name
    if name == "integer_pow":
        return equation.params["y"] % 2 == 0
    same = name == "mul" and equation.invars[0] is equation.invars[1]
    return same or name in _STOPS


def _index_operands(equation: Any, wanted: Sequence[Demand]) -> list[Demand]:
    name = equation.primitive.name
    needed: list[Demand] = [None] * len(equation.invars)
    if name == "gather":
        sizes = equation.invars[0].aval.shape
        looked_up = equation.params["dimension_numbers"].start_index_map
        needed[1] = min((sizes[dimension] for dimension in looked_up), default=None)
        return needed
    if name == "dynamic_slice":
        taken = zip(equation.invars[0].aval.shape, equation.params["slice_sizes"], strict=True)
        needed[1:] = [float(size - part + 1) for size, part in taken]
    if name in _SAME_INDEX and (bound := least(wanted)) is not None:
        holds = _DATA_OPERANDS.get(name, range(name == "select_n", len(needed)))
        for position in holds:
            if jnp.issubdtype(equation.invars[position].aval.dtype, jnp.integer):
                needed[position] = bound
    return needed
