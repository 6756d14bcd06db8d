"""Takes the body of a loop as the step, where the whole training of a script is one call of a
jitted function (jax)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from automesh.program.capture.abstract.arrays import described
from automesh.program.capture.flow.program import (
    TrainingLoop,
    is_literal,
    loop_body,
    opened_jaxpr,
)
from automesh.program.capture.hooks import settings_of
from automesh.program.capture.step_call import TracedCall
from automesh.program.lower.static_args import is_ref
from automesh.program.spec_entries import entries_of


def turn_of(call: TracedCall, loop: TrainingLoop) -> TracedCall:
    """Returns one turn of a loop as a call of its own.

    Runs what the program does before the loop, so that the turn has the values of the first turn.
    Its arguments are what the loop carries, its slice of what the loop goes over, and what the loop
    only reads, in this order.
    """
    turn = _Turn.of(call, loop)
    leaves = [
        leaf if to is None or is_ref(leaf) else jax.device_put(leaf, to)
        for leaf, to in zip(call.leaves, call.settings.in_shardings, strict=True)
    ]
    made = plain_jit(turn.operands)(*turn.held, *call.settings.constants, *leaves)
    return turn.call(made)


def described_turn(call: TracedCall, loop: TrainingLoop) -> tuple[TracedCall, int]:
    """Returns one turn without data, for a call without data, and how many arrays the loop carries.

    An operand that is an unchanged argument of the call is split as that argument.
    """
    turn = _Turn.of(call, loop)
    held = [*turn.held, *call.settings.constants]
    inputs = [*held, *call.leaves]
    stated = [getattr(one, "sharding", None) for one in held]
    stated += [
        to or getattr(leaf, "sharding", None)
        for leaf, to in zip(call.leaves, call.settings.in_shardings, strict=True)
    ]
    made = list(jax.eval_shape(turn.operands, *described(tuple(inputs))))
    for place, source in enumerate(turn.sources):
        sharding = stated[source] if source is not None else None
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
      held: arrays that the program holds. They are inputs like its own, as an array that is
        compiled into a program has no split there.
      operands: a function that takes the held arrays and the program's inputs, and returns what one
        turn starts from.
      constants, carried: how many operands are only read, and how many are carried.
      sources: per operand, its position among the held arrays and the inputs, if it is one of them.
    """

    body: Any
    held: tuple[Any, ...]
    operands: Callable[..., tuple[Any, ...]]
    constants: int
    carried: int
    sources: tuple[int | None, ...]

    @property
    def sliced(self) -> range:
        return range(self.constants + self.carried, len(self.body.invars))

    @staticmethod
    def of(call: TracedCall, loop: TrainingLoop) -> _Turn:
        """Finds the loop in the program of a call."""
        equation = _equation_at(call.traced.jaxpr, loop.path)
        body, constants, carried = loop_body(equation)
        program = call.traced.jaxpr
        before, held = _until(program, loop.path), tuple(_held(program, loop.path))
        # A `while` has the constants of its condition before those of its body.
        first = len(equation.invars) - len(body.invars)

        inputs = range(len(held), len(held) + len(opened_jaxpr(program).invars))

        def operands(*values: Any) -> tuple[Any, ...]:
            found = before(values[: len(held)], values[len(held) :])[first:]
            return tuple(
                value[0] if place >= constants + carried else value
                for place, value in enumerate(found)
            )

        return _Turn(
            body=body,
            held=held,
            operands=operands,
            constants=constants,
            carried=carried,
            sources=tuple(_sources(program, loop.path, inputs)[first:]),
        )

    def call(self, made: Sequence[Any]) -> TracedCall:
        """Returns one turn that starts from given operands."""
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
    """Returns what jax's own `jax.jit` makes of a function, also while a hook replaces it."""
    return importlib.import_module("jax._src.api").jit(function, **settings)


def closed(jaxpr: Any) -> Any:
    """Returns a jaxpr without constants in the form that jax calls, a closed one; from jax 0.12 on
    all jaxprs have it."""
    kind: Any = getattr(importlib.import_module("jax._src.core"), "ClosedJaxpr", None)
    return jaxpr if kind is None or isinstance(jaxpr, kind) else kind(jaxpr, ())


def _equation_at(jaxpr: Any, path: Sequence[int]) -> Any:
    equation = opened_jaxpr(jaxpr).eqns[path[0]]
    return _equation_at(equation.params["jaxpr"], path[1:]) if len(path) > 1 else equation


def _held(jaxpr: Any, path: Sequence[int]) -> list[Any]:
    """Returns the arrays that a program holds, and those of the programs that lead to one of its
    equations."""
    own = list(getattr(jaxpr, "consts", ()))
    return own if len(path) == 1 else [*own, *_held(_inside(jaxpr, path), path[1:])]


def _inside(jaxpr: Any, path: Sequence[int]) -> Any:
    return opened_jaxpr(jaxpr).eqns[path[0]].params["jaxpr"]


def _until(jaxpr: Any, path: Sequence[int]) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """Returns a function that takes the arrays of `_held` and the program's inputs, and returns the
    operands of one of its equations."""
    opened = opened_jaxpr(jaxpr)
    equation = opened.eqns[path[0]]
    variables = [variable for variable in equation.invars if not is_literal(variable)]
    # From jax 0.12 on a jaxpr itself has the arrays that it holds.
    without = {"consts": ()} if getattr(opened, "consts", None) else {}
    part = opened.replace(
        constvars=[],
        invars=[*opened.constvars, *opened.invars],
        eqns=opened.eqns[: path[0]],
        outvars=variables,
        debug_info=opened.debug_info.with_unknown_names(),
        **without,
    )
    inner = _until(_inside(jaxpr, path), path[1:]) if len(path) > 1 else None

    def run(held: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        own = len(opened.constvars)
        made = iter(jaxpr_as_fun(closed(part))(*held[:own], *values))
        operands = [
            variable.val if is_literal(variable) else next(made) for variable in equation.invars
        ]
        return operands if inner is None else inner(held[own:], operands)

    return run


def _sources(
    jaxpr: Any, path: Sequence[int], given: Sequence[int | None], first: int = 0
) -> list[int | None]:
    """Returns, for each operand of an equation, the position of the array that it is, among those
    of `_held` and the inputs of the whole program; None if it is none of them.

    Args:
      given: these positions for the inputs of this program.
      first: the position of the first array that this program holds.
    """
    opened = opened_jaxpr(jaxpr)
    own = range(first, first + len(opened.constvars))
    places = dict(zip([*opened.constvars, *opened.invars], [*own, *given], strict=True))
    found = [None if is_literal(one) else places.get(one) for one in opened.eqns[path[0]].invars]
    return found if len(path) == 1 else _sources(_inside(jaxpr, path), path[1:], found, own.stop)
