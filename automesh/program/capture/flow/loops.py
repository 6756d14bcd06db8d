"""The body of a loop as the step: of a script whose whole training is one call of a jitted function
(jax)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from automesh.program.capture.abstract_arrays import described
from automesh.program.capture.flow.program import (
    TrainingLoop,
    is_literal,
    loop_body,
    opened_jaxpr,
)
from automesh.program.capture.hooks import settings_of
from automesh.program.capture.step_call import TracedCall
from automesh.program.spec_entries import entries_of


def turn_of(call: TracedCall, loop: TrainingLoop) -> TracedCall:
    """One turn of a loop as a call of its own.

    What the program does before the loop is run, so that the turn has the values of the first one:
    what it carries, its slice of what the loop goes over, and what it only reads, in this order.
    """
    turn = _Turn.of(call, loop)
    made = plain_jit(turn.operands)(*call.settings.constants, *call.leaves)
    return turn.call(made)


def described_turn(call: TracedCall, loop: TrainingLoop) -> tuple[TracedCall, int]:
    """The same without data, for a call without data; and how many arrays the loop carries.

    Where operands are arguments of the call as they are, they are split as those.
    """
    turn = _Turn.of(call, loop)
    inputs = [*call.settings.constants, *call.leaves]
    made = list(jax.eval_shape(turn.operands, *described(tuple(inputs))))
    for place, source in enumerate(turn.sources):
        sharding = getattr(inputs[source], "sharding", None) if source is not None else None
        if isinstance(sharding, NamedSharding):
            spec = (
                PartitionSpec(*entries_of(sharding.spec)[1:])
                if place in turn.sliced
                else sharding.spec
            )
            made[place] = made[place].update(sharding=NamedSharding(sharding.mesh, spec))
    return turn.call(made), turn.carried


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A loop in a program.

    Attributes:
      operands: a function of the program's inputs that gives what one turn starts from.
      constants, carried: how many operands are only read, and how many are carried.
      sources: per operand, the input of the program that it is.
    """

    body: Any
    operands: Callable[..., tuple[Any, ...]]
    constants: int
    carried: int
    sources: tuple[int | None, ...]

    @property
    def sliced(self) -> range:
        return range(self.constants + self.carried, len(self.body.invars))

    @staticmethod
    def of(call: TracedCall, loop: TrainingLoop) -> _Turn:
        """The loop of a call."""
        equation = _equation_at(call.traced.jaxpr, loop.path)
        body, constants, carried = loop_body(equation)
        before = _until(call.traced.jaxpr, loop.path)
        # A `while` has the constants of its condition before those of its body.
        first = len(equation.invars) - len(body.invars)

        def operands(*values: Any) -> tuple[Any, ...]:
            found = before(values)[first:]
            return tuple(
                value[0] if place >= constants + carried else value
                for place, value in enumerate(found)
            )

        return _Turn(
            body=body,
            operands=operands,
            constants=constants,
            carried=carried,
            sources=tuple(_sources(call.traced.jaxpr, loop.path)[first:]),
        )

    def call(self, made: Sequence[Any]) -> TracedCall:
        """One turn that starts from operands."""
        body, first = self.body, self.constants + self.carried

        def turn(state: Any, slices: Any, read: Any) -> Any:
            return tuple(jaxpr_as_fun(closed(body))(*read, *state, *slices))

        state, slices, read = made[self.constants : first], made[first:], made[: self.constants]
        args = (tuple(state), tuple(slices), tuple(read))
        traced = plain_jit(turn, donate_argnums=0).trace(*described(args))
        return TracedCall(
            traced=traced,
            args=args,
            settings=settings_of(traced),
            names=tuple(
                f"{name}[{place}]"
                for name, part in zip(("carry", "slice", "read"), args, strict=True)
                for place in range(len(part))
            ),
        )


def plain_jit(function: Any, **settings: Any) -> Any:
    """`jax.jit` itself, whatever stands under its name."""
    return importlib.import_module("jax._src.api").jit(function, **settings)


def closed(jaxpr: Any) -> Any:
    """A jaxpr without constants in the form that jax calls; from jax 0.12 on it has no other."""
    kind: Any = getattr(importlib.import_module("jax._src.core"), "ClosedJaxpr", None)
    return jaxpr if kind is None or isinstance(jaxpr, kind) else kind(jaxpr, ())


def _equation_at(jaxpr: Any, path: Sequence[int]) -> Any:
    equation = opened_jaxpr(jaxpr).eqns[path[0]]
    return _equation_at(equation.params["jaxpr"], path[1:]) if len(path) > 1 else equation


def _until(jaxpr: Any, path: Sequence[int]) -> Any:
    """A function of a program's inputs that gives the operands of an equation in it."""
    opened = opened_jaxpr(jaxpr)
    equation = opened.eqns[path[0]]
    variables = [variable for variable in equation.invars if not is_literal(variable)]
    part = opened.replace(
        eqns=opened.eqns[: path[0]],
        outvars=variables,
        debug_info=opened.debug_info.with_unknown_names(),
    )
    inner = _until(equation.params["jaxpr"], path[1:]) if len(path) > 1 else None

    def run(values: Sequence[Any]) -> list[Any]:
        made = iter(jaxpr_as_fun(closed(part))(*values))
        operands = [
            variable.val if is_literal(variable) else next(made) for variable in equation.invars
        ]
        return operands if inner is None else inner(operands)

    return run


def _sources(jaxpr: Any, path: Sequence[int]) -> list[int | None]:
    """Per operand of an equation, the input of the program that it is, where it is one."""
    opened = opened_jaxpr(jaxpr)
    equation = opened.eqns[path[0]]
    places = {variable: place for place, variable in enumerate(opened.invars)}
    own = [None if is_literal(one) else places.get(one) for one in equation.invars]
    if len(path) == 1:
        return own
    inner = _sources(equation.params["jaxpr"], path[1:])
    return [own[place] if place is not None else None for place in inner]
