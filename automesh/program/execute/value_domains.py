"""Which values the arguments of a step must have to make sense, read off the traced program (jax).

Synthetic floats should have both signs, as weights do: a network of positive weights computes
nearly the same loss whatever one does to it, and hides wrong numerics. But a negative second
moment under a square root, or a mask whose sum passes through zero in a denominator, breaks a
step. So each operand of a root, a logarithm, a power or a denominator is followed back to the
arguments; what reaches one without passing through something that makes it positive (a square,
an exponential) or that mixes it (a matrix product) makes it positive. In the same way the sizes
of what is looked up by index bound the integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from automesh.program.execute.backward import Demand, demands_on_inputs, least

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
# What comes out does not take its sign from what goes in.
_STOPS = frozenset(
    {
        *("exp", "exp2", "abs", "square", "logistic", "cosh", "erfc", "sign", "is_finite"),
        *("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"),
        *("eq", "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "iota"),
        *("random_bits", "random_wrap", "cholesky", "eigh", "svd", "qr", "triangular_solve"),
    }
)
# Operands that hold data; the others say where it is.
_DATA_OPERANDS = {"gather": (0,), "dynamic_slice": (0,), "get": (0,)}
# An index is the same index after these; of `select_n`, the first operand only chooses.
_SAME_INDEX = frozenset(
    {
        *("convert_element_type", "reshape", "broadcast_in_dim", "transpose", "squeeze", "copy"),
        *("expand_dims", "slice", "dynamic_slice", "concatenate", "rev", "add", "sub", "pad"),
        *("sharding_constraint", "reshard", "mesh_cast", "get", "all_gather", "pvary", "select_n"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """What the values of one leaf may be.

    Attributes:
      positive: floats: True if only positive values are safe.
      below: integers: a bound that the step's look-ups set; None if they set none.
    """

    positive: bool = False
    below: int | None = None


def domains(traced: jax.stages.Traced) -> tuple[Domain, ...]:
    """The domain of every leaf of (args, kwargs)."""
    closed: Any = traced.jaxpr
    nothing = [None] * len(closed.jaxpr.outvars)
    positive = demands_on_inputs(closed.jaxpr, nothing, _positive_operands)
    bounds = demands_on_inputs(closed.jaxpr, nothing, _index_operands)
    found = [
        Domain(positive=sign is not None, below=None if bound is None else int(bound))
        for sign, bound in zip(positive, bounds, strict=True)
    ]
    # Constants that jax has lifted into arguments come first.
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
