"""Following demands on intermediate values of a traced program back to its arguments (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from automesh.program.lower.jaxpr_params import scan_operands

# What is asked of a value, as a number; of two demands the smaller one counts. None: nothing is
# asked.
Demand = float | None
# Equation and demands on its outputs -> demands on its operands.
Rule = Callable[[Any, Sequence[Demand]], Sequence[Demand]]


def demands_on_inputs(jaxpr: Any, outputs: Sequence[Demand], rule: Rule) -> list[Demand]:
    """What is asked of each input of a jaxpr.

    Args:
      jaxpr: an open one.
      outputs: what is asked of each of its outputs.
      rule: how an equation without a body hands demands on, its own included.
    """
    asked: dict[int, float] = {}
    _add(asked, jaxpr.outvars, outputs)
    # References are written after they are read: go round until nothing changes.
    while True:
        before = dict(asked)
        for equation in reversed(jaxpr.eqns):
            wanted = [asked.get(id(var)) for var in equation.outvars]
            bodies = _bodies(equation)
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
        # Literals have a value instead of a place.
        if demand is not None and not hasattr(variable, "val"):
            asked[id(variable)] = min(demand, asked.get(id(variable), demand))


def _bodies(equation: Any) -> list[Any]:
    """The open jaxprs that the equation runs."""
    found: list[Any] = []
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found


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
    # A call that we do not know: whatever goes in may come out.
    return [least(wanted)] * len(equation.invars)


def _loop(
    body: Any, wanted: Sequence[Demand], constants: int, carried: int, rule: Rule
) -> list[Demand]:
    """Hands demands round until what goes in is asked for no more than what comes out."""
    outputs = list(wanted)
    while True:
        inputs = demands_on_inputs(body, outputs, rule)
        again = [least(pair) for pair in zip(outputs, inputs[constants : constants + carried])]
        if again == outputs[:carried]:
            return inputs
        outputs[:carried] = again


def least(demands: Sequence[Demand]) -> Demand:
    """The strictest of several demands."""
    return min((demand for demand in demands if demand is not None), default=None)
