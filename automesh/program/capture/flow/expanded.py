"""Opens operations that jax defines by a function of other operations (jax).

From 0.12 on some functions of `jax.numpy`, such as `searchsorted`, are one operation of a traced
program, `call_hi_primitive`, whose parameter `_prim` has the function `expand`. Older releases
trace the function itself.
"""

from __future__ import annotations

from typing import Any

import jax

_NAME = "call_hi_primitive"


def expansion_of(equation: Any) -> Any | None:
    """Returns the program that an operation stands for, with the inputs and results of the
    operation; None if it is no such operation, or if this release of jax has it in another form."""
    if equation.primitive.name != _NAME:
        return None
    expand = getattr(equation.params.get("_prim"), "expand", None)
    if expand is None:
        return None
    given = [var.aval for var in equation.invars]
    try:
        program: Any = jax.make_jaxpr(expand)(
            *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in given)
        )
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    made = [variable.aval.shape for variable in program.jaxpr.outvars]
    return program if made == [variable.aval.shape for variable in equation.outvars] else None
