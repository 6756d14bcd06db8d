"""Reads from the traced program of a jitted function which role it has in a training (jax).

* A function that trains has a gradient in it: jax names each operation of a backward pass
  `transpose(...)`.
* An output that is an unchanged argument is no new state: a function under `nnx.jit` returns the
  model also where it only reads it.
* Where an outer loop carries arrays and takes gradients of them, one call holds many steps, and
  perhaps the whole training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

from automesh.package import is_users_file
from automesh.program.capture.nouns import SourceLine
from automesh.program.execute.value_domains import scan_operands

_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
# Operations whose result is their operand.
_SAME = frozenset({"sharding_constraint", "optimization_barrier", "copy", "copy_p", "reshard"})
_PROGRAMS = (core.ClosedJaxpr, core.Jaxpr)
_WORD = re.compile(r"\w+")
_WRITES = frozenset({"swap", "addupdate"})
_LOOPS = frozenset({"scan", "while"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """A loop of a program that carries parameters from step to step.

    Attributes:
      path: positions of the equations that lead to it; all but the last are calls.
      at: the user's line that makes it.
      turns: how many steps it does; 0 where only its run tells.
    """

    path: tuple[int, ...]
    at: SourceLine
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFacts:
    """The facts in the program of a function; its leaves are those of the function's arguments.

    Attributes:
      forwarded: per output the leaf that it is, if it is an unchanged one; None if it is computed.
      written: leaves that are references and that the function changes.
      has_gradient: whether there is a backward pass in it.
      trained_by: per output a bit mask of the leaves from whose gradients it is made.
      updated_by: per output a bit mask of the leaves from whose gradients it is made, and that
        reach it without a gradient, too: a parameter with its update, and not its gradient.
      trained_references: leaves that are references and that the function changes by their own
        gradients.
      loop: the outermost loop that holds many training steps.
      flops: FLOPs of matrix products and convolutions, and one per element of all other results.
    """

    forwarded: tuple[int | None, ...]
    written: frozenset[int]
    has_gradient: bool
    trained_by: tuple[int, ...]
    updated_by: tuple[int, ...]
    trained_references: frozenset[int]
    loop: TrainingLoop | None
    flops: float


def facts_of(jaxpr: Any, *, num_constants: int) -> FunctionFacts:
    """Reads a program.

    Args:
      num_constants: number of leading inputs that are not arguments of the function.
    """
    opened = opened_jaxpr(jaxpr)
    places = {var: place for place, var in enumerate(opened.invars)}
    written = {places[var] - num_constants for var in _written(opened) if var in places}
    gradient = has_gradient(opened)
    flows, references = _trained(opened, num_constants) if gradient else ((), frozenset[int]())
    loop = _training_loop(opened, ())
    return FunctionFacts(
        forwarded=forwarded(opened, num_constants=num_constants),
        written=frozenset(place for place in written if place >= 0),
        has_gradient=gradient,
        trained_by=tuple(flow.through for flow in flows),
        updated_by=tuple(flow.through & flow.direct for flow in flows),
        trained_references=references & written,
        loop=None if loop is None or _is_part_of_step(opened, loop) else loop,
        flops=flops_of(opened),
    )


def forwarded(jaxpr: Any, *, num_constants: int) -> tuple[int | None, ...]:
    """Returns, for each output of a program, the leaf of the arguments that it is, if it is an
    unchanged one; None if it is computed."""
    opened = opened_jaxpr(jaxpr)
    places = {var: place for place, var in enumerate(opened.invars)}
    origins = _origins(opened)

    def leaf(variable: Any) -> int | None:
        place = None if is_literal(variable) else places.get(origins.get(variable, variable))
        return None if place is None or place < num_constants else place - num_constants

    return tuple(map(leaf, opened.outvars))


def _trained(jaxpr: Any, num_constants: int) -> tuple[tuple[Flow, ...], frozenset[int]]:
    """Returns, for each output, the leaves of which it is made; and the references that are changed
    by their own gradients."""
    inputs = [Flow()] * num_constants
    inputs += [
        Flow(made_of=1 << place, direct=1 << place)
        for place in range(len(jaxpr.invars) - num_constants)
    ]
    outputs, after = follow(jaxpr, inputs)
    own = enumerate(after[num_constants:])
    return tuple(outputs), frozenset(place for place, flow in own if flow.through >> place & 1)


def opened_jaxpr(jaxpr: Any) -> Any:
    """Returns a jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants_in(closed: Any) -> dict[Any, int]:
    """Returns for the variables of a program's constants, also in programs inside, which array each
    is: variables with equal numbers are one array."""
    found: dict[Any, int] = {}
    to_do, seen = [closed], set[int]()
    while to_do:
        one = to_do.pop()
        opened = opened_jaxpr(one)
        if id(one) in seen:
            continue
        seen.add(id(one))
        for var, constant in zip(opened.constvars, getattr(one, "consts", ()), strict=False):
            if getattr(constant, "ndim", 0):
                found[var] = id(constant)
        for equation in opened.eqns:
            for value in equation.params.values():
                several = value if isinstance(value, tuple | list) else (value,)
                to_do += [each for each in several if isinstance(each, _PROGRAMS)]
    return found


def is_literal(variable: Any) -> bool:
    """Whether an operand is a number, and not a variable."""
    return hasattr(variable, "val")


def _bodies(equation: Any) -> Iterator[Any]:
    if (solver := solver_of(equation)) is not None:
        yield solver
        return
    for body in core.jaxprs_in_params(equation.params):
        yield opened_jaxpr(body)


def names_inside(jaxpr: Any) -> set[str]:
    """Returns the names of the jitted functions that a program calls, at any depth."""
    found: set[str] = set()
    for equation in opened_jaxpr(jaxpr).eqns:
        name = equation.params.get("name")
        # The gradient of a function is called `transpose(jvp(name))`.
        found.update(_WORD.findall(name) if isinstance(name, str) else ())
        for body in core.jaxprs_in_params(equation.params):
            found |= names_inside(body)
    return found


def solver_of(equation: Any) -> Any | None:
    """Returns the program that a linear solver runs; None for another operation. Its other programs
    say what is solved, and how gradients are, and are not run; jax makes some of them by
    transposing, but they are no backward pass.
    """
    if equation.primitive.name != "custom_linear_solve":
        return None
    solve = getattr(equation.params.get("jaxprs"), "solve", None)
    return None if solve is None else opened_jaxpr(solve)


def solver_operands(equation: Any) -> list[int] | None:
    """Returns the positions of the operands that the program of `solver_of` gets; None if this
    version of jax has them in another form."""
    lengths = equation.params.get("const_lengths")
    counts = [getattr(lengths, name, None) for name in ("matvec", "vecmat", "solve")]
    rest = getattr(lengths, "transpose_solve", None)
    known = [count for count in counts if isinstance(count, int)]
    if len(known) < len(counts) or not isinstance(rest, int):
        return None
    first = sum(known[:2])
    return [*range(first, first + known[2]), *range(sum(known) + rest, len(equation.invars))]


def is_backward(equation: Any) -> bool:
    """Whether an operation is one of a backward pass."""
    return "transpose(" in str(equation.source_info.name_stack)


def is_differentiated(equation: Any) -> bool:
    """Whether a gradient is taken through an operation, as through a loss, in either pass."""
    return "jvp(" in str(equation.source_info.name_stack)


def has_gradient(jaxpr: Any) -> bool:
    """Whether there is a backward pass in a program."""
    return any(
        is_backward(equation) or any(map(has_gradient, _bodies(equation)))
        for equation in jaxpr.eqns
    )


def takes_gradients(equation: Any) -> bool:
    """Whether there is a backward pass in a program that an operation runs, such as a loop."""
    return any(map(has_gradient, _bodies(equation)))


def _origins(jaxpr: Any) -> dict[Any, Any]:
    """Returns, for each variable that has the value of an earlier one, that earlier one."""
    found: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _SAME:
            pairs = zip(equation.outvars, equation.invars)
        elif name in _CALLS:
            body = next(_bodies(equation))
            inside = _origins(body)
            given = dict(zip(body.invars, equation.invars, strict=True))
            pairs = [
                (out, given[origin])
                for out, inner in zip(equation.outvars, body.outvars, strict=True)
                if not is_literal(inner) and (origin := inside.get(inner, inner)) in given
            ]
        else:
            continue
        for out, operand in pairs:
            if not is_literal(operand):
                found[out] = found.get(operand, operand)
    return found


def _written(jaxpr: Any) -> set[Any]:
    """Returns the variables of a program that are references and that it changes."""
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in _WRITES:
            found.add(equation.invars[0])
        for body in _bodies(equation):
            inside = _written(body)
            # The body lacks the first operands where they are the equation's own, as the predicate
            # of a branch.
            count = min(len(body.invars), len(equation.invars))
            pairs = zip(body.invars[-count:], equation.invars[-count:]) if count else ()
            found |= {outer for inner, outer in pairs if inner in inside}
    return found


def is_in_parts(jaxpr: Any) -> bool:
    """Whether some of a program runs on each device apart, in a `shard_map`."""
    return any(
        equation.primitive.name == "shard_map" or any(map(is_in_parts, _bodies(equation)))
        for equation in jaxpr.eqns
    )


def flops_of(jaxpr: Any) -> float:
    """Returns the FLOPs of a program; a loop of unknown length is counted as one turn."""
    total = 0.0
    for equation in jaxpr.eqns:
        bodies = list(_bodies(equation))
        if bodies:
            times = equation.params.get("length", 1)
            total += times * sum(map(flops_of, bodies))
            continue
        made = sum(math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars)
        total += made * _work_per_element(equation)
    return total


def _work_per_element(equation: Any) -> float:
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * math.prod(equation.invars[0].aval.shape[place] for place in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        features = equation.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(kernel) / max(kernel[features], 1)
    return 1.0


def loop_body(equation: Any) -> tuple[Any, int, int]:
    """Returns the body of a `scan` or `while`, how many operands are its constants, and how many it
    carries.

    Raises:
      UnknownLoop: this version of jax states it in another way.
    """
    if equation.primitive.name == "scan":
        constants, carried = scan_operands(equation)
        return opened_jaxpr(equation.params["jaxpr"]), constants, carried
    body = opened_jaxpr(equation.params["body_jaxpr"])
    constants = equation.params["body_nconsts"]
    return body, constants, len(body.invars) - constants


def training_steps(jaxpr: Any) -> int:
    """Counts the training steps in a call: the turns of the loop that holds many steps, times those
    of training loops inside it, as for batches inside epochs. 0 if only a run shows their number, 1
    without a loop, or if the loop is a part of one step: where another gradient is taken beside it,
    as of the samples or the critic that the loop has made better."""
    opened = opened_jaxpr(jaxpr)
    loop = _training_loop(opened, ())
    if loop is None:
        return 1
    if _is_part_of_step(opened, loop):
        return 1
    *calls, last = loop.path
    for place in calls:
        opened = next(_bodies(opened.eqns[place]))
    return loop.turns * training_steps(loop_body(opened.eqns[last])[0])


def _is_part_of_step(jaxpr: Any, loop: TrainingLoop) -> bool:
    """Whether a loop is a part of one step, as a search along a line is, or the training of a
    critic before its generator: another gradient is taken beside it."""
    opened = opened_jaxpr(jaxpr)
    for place in loop.path:
        if _takes_gradients_beside(opened, place):
            return True
        bodies = list(_bodies(opened.eqns[place]))
        opened = bodies[0] if bodies else opened
    return False


def _takes_gradients_beside(jaxpr: Any, place: int) -> bool:
    """Whether a program takes a gradient in another equation than one."""
    return any(
        is_backward(equation) or any(map(has_gradient, _bodies(equation)))
        for number, equation in enumerate(jaxpr.eqns)
        if number != place
    )


def _training_loop(jaxpr: Any, path: tuple[int, ...]) -> TrainingLoop | None:
    """Returns the outermost loop of a program that holds many training steps."""
    for place, equation in enumerate(jaxpr.eqns):
        stack = str(equation.source_info.name_stack)
        if "transpose(" in stack or "jvp(" in stack:
            continue  # A part of a step: its gradient goes through the loop.
        here = (*path, place)
        if equation.primitive.name in _CALLS:
            found = _training_loop(next(_bodies(equation)), here)
            if found is not None:
                return found
        elif equation.primitive.name in ("scan", "while") and _trains(*loop_body(equation)):
            turns = equation.params.get("length") or 0
            return TrainingLoop(path=here, at=line_of(equation), turns=int(turns))
    return None


def line_of(equation: Any) -> SourceLine:
    """Returns the innermost line of the user's code that makes an operation."""
    traceback: Any = getattr(equation.source_info, "traceback", None)
    frames: Any = getattr(traceback, "frames", None) or ()
    for frame in frames:
        if is_users_file(frame.file_name):
            return SourceLine(file=frame.file_name, line=int(frame.line_num))
    return SourceLine()


def _trains(body: Any, constants: int, carried: int) -> bool:
    """Whether a loop carries something that it replaces by what it makes from its gradient.

    Loops over micro-batches also carry sums of gradients, but take no gradient of these.
    """
    inputs = [Flow()] * constants
    inputs += [Flow(made_of=1 << place) for place in range(carried)]
    inputs += [Flow()] * (len(body.invars) - constants - carried)
    outputs, _ = follow(body, inputs)
    return any(flow.through >> place & 1 for place, flow in enumerate(outputs[:carried]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The inputs that a variable is made of, each attribute a bit mask of positions.

    Attributes:
      made_of: all inputs that it is made of.
      through: those from whose gradients it is made.
      direct: those that reach it by a way without a gradient.
    """

    made_of: int = 0
    through: int = 0
    direct: int = 0

    @staticmethod
    def of(flows: Sequence[Flow], *, is_gradient: bool) -> Flow:
        """Returns the flow of a value that is made of several ones, in a backward pass or outside
        of one."""
        made_of = through = direct = 0
        for flow in flows:
            made_of |= flow.made_of
            through |= flow.through
            direct |= flow.direct
        if is_gradient:
            return Flow(made_of=made_of, through=through | made_of)
        return Flow(made_of=made_of, through=through, direct=direct)

    def __or__(self, other: Flow) -> Flow:
        return Flow.of((self, other), is_gradient=False)


def follow(
    jaxpr: Any, inputs: Sequence[Flow], *, into_loops: bool = False
) -> tuple[list[Flow], list[Flow]]:
    """Returns what each output of a program is made of, then the same of each input: references
    change.

    Args:
      into_loops: whether the turns of loops that take gradients are followed, to find from which
        operands each result comes. Otherwise every result counts as made of every operand.
    """
    known: dict[Any, Flow] = dict(zip(jaxpr.invars, inputs, strict=True))

    def flow_of(variable: Any) -> Flow:
        return Flow() if is_literal(variable) else known.get(variable, Flow())

    for equation in jaxpr.eqns:
        given = [flow_of(variable) for variable in equation.invars]
        backward = is_backward(equation)
        name = equation.primitive.name
        if name in _CALLS and not backward:
            made, after = follow(next(_bodies(equation)), given, into_loops=into_loops)
            known |= {
                variable: flow
                for variable, flow in zip(equation.invars, after, strict=True)
                if not is_literal(variable)
            }
        else:
            inside = any(map(has_gradient, _bodies(equation)))
            if into_loops and not backward and name in _LOOPS:
                made = _around(equation, given, takes_gradients=inside)
            elif into_loops and not backward and name == "cond":
                made = _either(equation, given)
            else:
                together = Flow.of(given, is_gradient=backward or inside)
                if _decides(equation):
                    together = Flow(made_of=together.made_of)
                made = [together] * len(equation.outvars)
                if name in _WRITES:
                    known[equation.invars[0]] = together
        known.update(zip(equation.outvars, made, strict=True))
    return [flow_of(variable) for variable in jaxpr.outvars], [
        flow_of(variable) for variable in jaxpr.invars
    ]


def _decides(equation: Any) -> bool:
    """Whether an operation gives one truth value. A gradient that only decides, by whether it is
    finite, makes no parameter of what the step then chooses, such as the scale of a loss."""
    avals = [variable.aval for variable in equation.outvars]
    return bool(avals) and all(
        str(getattr(a, "dtype", "")) == "bool" and not a.shape for a in avals
    )


def _either(equation: Any, given: Sequence[Flow]) -> list[Flow]:
    """Returns what the results of a `cond` are made of, in whichever branch."""
    found = [Flow.of(given[:1], is_gradient=False)] * len(equation.outvars)
    for body in _bodies(equation):
        made, _ = follow(body, given[1:], into_loops=True)
        found = [one | other for one, other in zip(found, made, strict=True)]
    return found


def _around(equation: Any, given: Sequence[Flow], *, takes_gradients: bool) -> list[Flow]:
    """Returns what the results of a loop are made of.

    If it takes gradients, that is after one turn, which is one iteration of the training: more
    turns would mix all, as parameters are made of moments, and moments of gradients. Else it is
    after all turns: what a loop of actions carries unchanged, such as the training state, stays
    unchanged.
    """
    body, constants, carried = loop_body(equation)
    if equation.primitive.name == "while":
        given = given[equation.params["cond_nconsts"] :]
    first, carry = given[:constants], given[constants : constants + carried]
    slices = given[constants + carried :]
    while True:
        made, _ = follow(body, [*first, *carry, *slices], into_loops=True)
        after = [one | other for one, other in zip(carry, made, strict=False)]
        if takes_gradients:
            return made
        if after == carry:
            return [*after, *made[carried:]]
        carry = after
