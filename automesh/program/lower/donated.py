"""Which arguments the jitted functions inside of a step donate (jax).

A step may be a plain function, a method or a `partial` that calls functions which `jax.jit`,
`nnx.jit` or `filter_jit` have made. Traced as a whole, what these donate is no longer given away,
since only the outermost function can: without this, the step would need twice the memory that it
needs in the user's own loop.
"""

from __future__ import annotations

from typing import Any, Literal

import jax

Use = Literal["donated", "kept", "unused"]


def donated_inside(traced: jax.stages.Traced) -> list[Use]:
    """For every array that the step takes, whether a jitted function at the top of the step donates
    it, others use it, or nothing does."""
    closed: Any = traced.jaxpr
    jaxpr = closed.jaxpr
    places = {id(variable): place for place, variable in enumerate(jaxpr.invars)}
    uses: list[Use] = ["unused"] * len(places)
    for equation in jaxpr.eqns:
        # Of a jitted function; another operation donates nothing.
        donated = equation.params.get("donated_invars", (False,) * len(equation.invars))
        for variable, gone in zip(equation.invars, donated, strict=True):
            place = places.get(id(variable))
            if place is not None and uses[place] != "donated":
                uses[place] = "donated" if gone else "kept"
    for variable in jaxpr.outvars:
        if (place := places.get(id(variable))) is not None and uses[place] == "unused":
            uses[place] = "kept"
    return uses
