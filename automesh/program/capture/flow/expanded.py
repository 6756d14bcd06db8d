"""Opens operations that are defined by a function of other operations (jax).

From 0.12 on some functions of `jax.numpy`, such as `searchsorted`, are one operation of a traced
program, `call_hi_primitive`, whose parameter `_prim` has the function `expand`. Older releases
trace the function itself. Libraries define operations as well, such as those by which Equinox and
Diffrax write loops: what they do is their `impl`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend import core

_NAME = "call_hi_primitive"
_OF_JAX = ("jax.", "jaxlib.")


def expansion_of(equation: Any) -> Any | None:
    """Returns the program that an operation stands for, with the inputs and results of the
    operation; None if it is no such operation, or if this release of jax has it in another form."""
    function = _function_of(equation)
    if function is None:
        return None
    given = [var.aval for var in equation.invars]
    try:
        program: Any = jax.make_jaxpr(function)(
            *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in given)
        )
    except Exception:  # noqa: BLE001 - a function of a library, which may fail in any way
        return None
    made = [variable.aval.shape for variable in program.jaxpr.outvars]
    fits = made == [variable.aval.shape for variable in equation.outvars]
    return program if fits and not _holds(program, equation.primitive) else None


def _holds(program: Any, primitive: Any) -> bool:
    """Whether an operation is in a program, which then says nothing of what the operation does."""
    return any(
        one.primitive is primitive
        or any(_holds(inner, primitive) for inner in core.jaxprs_in_params(one.params))
        for one in getattr(program, "jaxpr", program).eqns
    )


def _function_of(equation: Any) -> Callable[..., Any] | None:
    if equation.primitive.name == _NAME:
        return getattr(equation.params.get("_prim"), "expand", None)
    impl: Any = getattr(equation.primitive, "impl", None)
    while isinstance(impl, partial):  # jax runs most of its own operations by one function.
        impl = impl.func
    module = str(getattr(impl, "__module__", "") or "")
    # The `impl` of jax's own operations runs them, or says that there is none.
    if not module or module == "jax" or module.startswith(_OF_JAX):
        return None
    return partial(equation.primitive.impl, **equation.params)
