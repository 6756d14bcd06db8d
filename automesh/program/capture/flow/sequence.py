"""Takes a step out of a running script: one call, several calls of an iteration, or one turn of a
loop (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding

from automesh.errors import UsageError
from automesh.program.capture.abstract.arrays import described, is_abstract
from automesh.program.capture.flow.loops import closed, plain_jit, turn_of
from automesh.program.capture.flow.names import describe_call
from automesh.program.capture.flow.program import facts_of, opened_jaxpr
from automesh.program.capture.frames import asking_line
from automesh.program.capture.hooks import Call, settings_of
from automesh.program.capture.nouns import Carried, ScriptStep, SourceLine, StepPart
from automesh.program.capture.step_call import MadeBefore, PartSource, TracedCall, trace
from automesh.program.lower.static_args import is_ref


@dataclass(slots=True, kw_only=True)
class PartCall:
    """A call of one function of a step, and the leaves of its outputs.

    Attributes:
      kept: positions of the outputs that the whole step returns.
    """

    kept: tuple[int, ...]
    call: TracedCall
    outputs: list[Any] = field(default_factory=list[Any])


@dataclass(slots=True)
class StepCollector:
    """Collects the calls of a script until they make up a whole step.

    The last call of the step is not run.
    """

    step: ScriptStep
    _calls: dict[tuple[str, SourceLine], int] = field(
        default_factory=dict[tuple[str, SourceLine], int]
    )
    _collected: list[PartCall] = field(default_factory=list[PartCall])
    _is_running: bool = False
    # From the identity of an array that a part is about to destroy to the copy that the whole step
    # gets.
    _copies: dict[int, Any] = field(default_factory=dict[int, Any])

    def offer(self, call: Call) -> TracedCall | None:
        """Returns the step if this call completes it. Otherwise the caller runs the call, and gives
        its outputs to `ran`.

        Raises:
          UsageError: the step cannot be taken out of its script.
        """
        self._is_running = False
        name, _ = describe_call(call)
        place = (name, asking_line())
        parts = parts_of(self.step)
        places = [(part.name, part.called_at) for part in parts]
        if place not in places:
            return None
        self._calls[place] = self._calls.get(place, 0) + 1
        if place != places[len(self._collected)]:
            # Several calls of one function follow each other: the collection began in the middle of
            # a round.
            if place == places[0] or len(set(places)) < len(places):
                self._collected.clear()
                self._copies.clear()
            if place != places[0]:
                return None
        part = parts[len(self._collected)]
        if self._calls[place] <= part.skipped:
            return None
        self._collected.append(PartCall(kept=part.kept, call=trace(call, with_names=True)))
        if len(self._collected) == len(parts):
            return self._whole()
        self._is_running = True
        self._keep_donated(self._collected[-1].call)
        return None

    def _keep_donated(self, call: TracedCall) -> None:
        for leaf, donated in zip(call.leaves, call.settings.donated, strict=True):
            if donated and isinstance(leaf, jax.Array) and not is_abstract(leaf):
                self._copies.setdefault(id(leaf), leaf.copy())

    def ran(self, outputs: Any) -> None:
        """Notes down the outputs of the call that was offered last."""
        if self._is_running:
            self._collected[-1].outputs = jax.tree.leaves(outputs)

    def _whole(self) -> TracedCall:
        if len(self._collected) > 1:
            whole = as_one(self._collected)
            return replace(
                whole, args=tuple(self._copies.get(id(leaf), leaf) for leaf in whole.args)
            )
        call = self._collected[0].call
        if self.step.loop is None:
            return call
        facts = facts_of(call.traced.jaxpr, num_constants=len(call.settings.constants))
        if facts.loop is None:
            raise UsageError(
                f"`{self.step.name}` has no loop that trains on this mesh, though it has one on "
                "the script's own",
                hint="write a function `build(mesh)` that returns the step and its arguments",
            )
        return turn_of(call, facts.loop)

    @property
    def sources(self) -> list[list[int | None]]:
        """Returns, for each part and each leaf of its arguments, the argument of the whole step
        that it is; None for an output of an earlier part."""
        return composed(self._collected)[1]


def parts_of(step: ScriptStep) -> tuple[StepPart, ...]:
    """Returns the functions of a step; most steps have one."""
    return step.parts or (
        StepPart(
            name=step.name,
            defined_at=step.defined_at,
            called_at=step.called_at,
            skipped=step.skipped,
            kept=(),
        ),
    )


@dataclass(slots=True)
class _Arguments:
    """The arguments of several calls, each array once."""

    leaves: list[Any] = field(default_factory=list[Any])
    names: list[str] = field(default_factory=list[str])
    shardings: list[Any] = field(default_factory=list[Any])
    donated: set[int] = field(default_factory=set[int])
    _places: dict[int, int] = field(default_factory=dict[int, int])

    def place(self, leaf: Any, name: str, sharding: Any, *, donated: bool) -> int:
        """Returns the position of an argument, which is added if it is new. A number is always a
        new argument."""
        place = self._places.get(id(leaf)) if hasattr(leaf, "shape") else None
        if place is None:
            place = len(self.leaves)
            self._places[id(leaf)] = place
            self.leaves.append(leaf)
            self.names.append(name)
            self.shardings.append(None)
        self.shardings[place] = self.shardings[place] or sharding
        if donated:
            self.donated.add(place)
        return place


def composed(collected: Sequence[PartCall]) -> tuple[TracedCall, list[list[int | None]]]:
    """Makes one call that does what several calls do, one after the other.

    An output of one call that another one takes is recognized by its identity. What the script does
    with arrays outside of jit, between the calls, is not part of the whole: the arrays that come of
    it are arguments of the whole.

    Returns:
      The call; and, for each part and each leaf of its arguments, the position of the argument of
      the whole that it is, or None for an output of another part.
    """
    arguments = _Arguments()
    made: dict[int, tuple[int, int]] = {}
    wiring: list[list[int | tuple[int, int]]] = []
    for number, one in enumerate(collected):
        stated, wires = one.call.settings, list[int | tuple[int, int]]()
        for constant in stated.constants:
            if is_abstract(constant):
                wires.append(arguments.place(constant, "held", None, donated=False))
        names = one.call.names or [""] * len(one.call.leaves)
        for leaf, name, sharding, donated in zip(
            one.call.leaves, names, stated.in_shardings, stated.donated, strict=True
        ):
            inner = made.get(id(leaf))
            wires.append(
                inner
                if inner is not None
                else arguments.place(leaf, name, sharding, donated=donated)
            )
        wiring.append(wires)
        # An output that is an unchanged argument has the identity of that argument.
        made |= {id(output): (number, place) for place, output in enumerate(one.outputs)
                 if hasattr(output, "shape") and not is_ref(output)}  # fmt: skip

    def step(*leaves: Any) -> tuple[Any, ...]:
        results: list[list[Any]] = []
        for one, wires in zip(collected, wiring, strict=True):
            given = iter(
                [leaves[wire] if isinstance(wire, int) else results[wire[0]][wire[1]]
                 for wire in wires]
            )  # fmt: skip
            constants = [
                next(given) if is_abstract(constant) else constant
                for constant in one.call.settings.constants
            ]
            outputs = jaxpr_as_fun(closed(one.call.traced.jaxpr))(*constants, *given)
            results.append(_constrained(outputs, one.call.settings.out_shardings))
        return tuple(
            results[number][place] for number, one in enumerate(collected) for place in one.kept
        )

    settings: dict[str, Any] = {}
    if any(sharding is not None for sharding in arguments.shardings):
        settings["in_shardings"] = tuple(arguments.shardings)
    out = tuple(one.call.settings.out_shardings[place] for one in collected for place in one.kept)
    if any(sharding is not None for sharding in out):
        settings["out_shardings"] = out
    options = {
        key: value for one in collected for key, value in one.call.settings.compiler_options.items()
    }
    if options:
        settings["compiler_options"] = options
    jitted = plain_jit(step, donate_argnums=tuple(sorted(arguments.donated)), **settings)
    traced = jitted.trace(*described(tuple(arguments.leaves)))
    whole = TracedCall(
        traced=traced,
        args=tuple(arguments.leaves),
        settings=settings_of(traced),
        names=tuple(arguments.names),
        context=collected[-1].call.context,
        entered=collected[-1].call.entered,
    )
    sources: list[list[int | None]] = []
    for one, wires in zip(collected, wiring, strict=True):
        own = wires[len(wires) - len(one.call.leaves) :]
        sources.append([wire if isinstance(wire, int) else None for wire in own])
    return whole, sources


def as_one(collected: Sequence[PartCall]) -> TracedCall:
    """Makes one call of several ones, as `composed` does, that can be traced again."""
    whole, _ = composed(collected)
    sources = [
        PartSource(call=one.call.source, outputs=tuple(one.outputs), kept=one.kept)
        for one in collected
        if one.call.source is not None
    ]
    return replace(whole, sources=tuple(sources), taken=whole.args)


def composed_anew(sources: Sequence[PartSource]) -> TracedCall:
    """Traces several calls again, and makes one call that does what they do.

    Args:
      sources: their arguments may be `MadeBefore`, in place of outputs of earlier ones.
    """
    collected: list[PartCall] = []
    for source in sources:
        call = source.call

        def given(leaf: Any) -> Any:
            return collected[leaf.part].outputs[leaf.output] if _is_made(leaf) else leaf

        args, kwargs = jax.tree.map(given, (call.args, call.kwargs))
        traced = trace(replace(call, args=args, kwargs=kwargs))
        outputs = [_stated(out.aval) for out in opened_jaxpr(traced.traced.jaxpr).outvars]
        collected.append(PartCall(kept=source.kept, call=traced, outputs=outputs))
    return composed(collected)[0]


def _is_made(leaf: Any) -> bool:
    return isinstance(leaf, MadeBefore)


def _stated(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns an output without data; on Explicit axes its type says how it is split."""
    sharding = getattr(aval, "sharding", None)
    is_typed = sharding is not None and AxisType.Explicit in sharding.mesh.axis_types
    weak = bool(getattr(aval, "weak_type", False))
    to = sharding if is_typed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=to, weak_type=weak)


def _constrained(outputs: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Returns outputs with the shardings that their function gives them."""
    return [
        jax.lax.with_sharding_constraint(output, sharding)
        if isinstance(sharding, NamedSharding) and not is_ref(output)
        else output
        for output, sharding in zip(outputs, shardings, strict=True)
    ]


def carried_runs(pairs: Sequence[tuple[int, int]]) -> tuple[Carried, ...]:
    """Returns pairs (leaf of the arguments, output that replaces it) as runs of consecutive
    leaves."""
    runs: list[Carried] = []
    for argument, output in sorted(pairs):
        last = runs[-1] if runs else None
        if last and (last.argument + last.count, last.output + last.count) == (argument, output):
            runs[-1] = Carried(output=last.output, argument=last.argument, count=last.count + 1)
        else:
            runs.append(Carried(output=output, argument=argument, count=1))
    return tuple(runs)
