"""Finds the training step of a running script (jax)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from automesh.program.capture.flow.batch import batch_axes
from automesh.program.capture.flow.calls import (
    CallLog,
    Function,
    Noted,
    Variant,
    form_of,
    leaf_bytes,
    output_forms,
    parameters_in,
)
from automesh.program.capture.flow.choice import (
    Choice,
    Doubt,
    StepChoice,
    best,
    choice_of,
    is_enough,
    is_usual,
)
from automesh.program.capture.flow.host_copies import HostLeaf, with_leaves
from automesh.program.capture.flow.loops import described_turn, turn_of
from automesh.program.capture.flow.program import TrainingLoop, names_inside
from automesh.program.capture.flow.restless import about_programs
from automesh.program.capture.flow.rounds import (
    CALLS_TO_SEE,
    AccumulationRound,
    arguments_of,
    round_of,
)
from automesh.program.capture.flow.sequence import StepCollector, carried_runs
from automesh.program.capture.hooks import Call
from automesh.program.capture.nouns import Carried, LoopStep, ScriptStep, SourceLine, StepPart
from automesh.program.capture.run_script import stop_script
from automesh.program.capture.step_call import TracedCall, place_of
from automesh.program.lower.static_args import leaf_shape

# Share of a step's arguments that may be parameters of another step, and the seconds for which a
# script may go on until it calls that one.
_LASTING_SHARE = 0.1
_LONGEST_FOR_OTHERS_S = 20.0
# Calls, and seconds, for which a script is run on to see a function of the step that is called less
# often than the others.
_MOST_CUT_CALLS = 100
_LONGEST_CUT_S = 60.0
# FLOPs of a call: a call with more is not run until it is known not to be a whole training.
_LONG_FLOPS = 1e9
_DOUBTS = {
    Doubt.NONE: "",
    Doubt.NOTHING_TRAINED: "what comes back to it is no parameter that it trains",
    Doubt.NO_GRADIENT: "no gradient is taken in it",
    Doubt.CALLED_ONCE: "it is called once, and what comes back to it was told by its shapes",
    Doubt.LITTLE_STATE: "hardly anything of what it makes comes back to it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStep:
    """The step that was found, with the mesh axes of its batch and the meshes of its arguments.

    Attributes:
      others: other functions that are called again and again.
      meshes: the meshes over which its arguments are split, or shall be split.
      whole: the call of the step.
      placed: per leaf of its arguments, its placement at the first call of the variant that is the
        step, see `step_call.place_of`.
      kept: the arguments on the host, where the script has ended and the call has none; None if
        they are not kept. For a turn of a loop, those of the call that holds the loop.
      around: that call, without its arguments; None for any other step.
      source: where the arguments are kept, the call as the script made it, without its arrays.
      notices: what is unusual about its calls, a sentence each.
    """

    step: ScriptStep
    batch_axes: tuple[str, ...]
    meshes: tuple[Mesh, ...]
    others: tuple[ScriptStep, ...]
    whole: TracedCall
    placed: tuple[Any, ...]
    kept: tuple[HostLeaf, ...] | None = None
    around: tuple[TracedCall, TrainingLoop] | None = None
    source: Call | None = None
    notices: tuple[str, ...] = ()

    def with_values(self) -> TracedCall:
        """Returns the call of the step, with the values of its arguments where they are known."""
        if self.kept is None:
            return self.whole
        call, loop = self.around or (self.whole, None)
        tree, made = jax.tree.structure(call.args), [leaf.made() for leaf in self.kept]
        call = replace(call, args=tree.unflatten(made))
        if loop is not None:
            return turn_of(call, loop)
        return call if self.source is None else replace(call, source=with_leaves(self.source, made))


@dataclass(slots=True, kw_only=True)
class StepFinder:
    """Watches every call of a script, and stops the script at its step.

    Attributes:
      wanted: the name that the user gave; empty for the step that state flows through.
      on_long_loop: is called before a call that may be the whole training, so that this call is run
        without its data.
      known: the step, where an earlier run of the script has found it.
      trains_often: whether the script takes gradients in several places of its text.
      may_stop: is asked once the step is known, with whether a gradient is taken in it or the user
        named it; returns False where the script shall go on, to find another step.
      found: the step, once the script was stopped.
      has_gone_on: whether the script went on after its step was known.
    """

    wanted: str
    on_long_loop: Callable[[], None]
    known: ScriptStep | None = None
    trains_often: Callable[[], bool] = lambda: False
    may_stop: Callable[[bool], bool] = lambda _: True
    found: FoundStep | None = None
    has_gone_on: bool = False
    log: CallLog = field(default_factory=CallLog)
    _choice: Choice | None = None
    _chosen: ScriptStep | None = None
    _collector: StepCollector | None = None
    _round: AccumulationRound | None = None
    # Functions that train, and are run on because another one may train with them.
    _waiting: set[int] = field(default_factory=set[int])

    @property
    def is_waiting(self) -> bool:
        """Whether a function that trains was seen, and the script goes on because another one may
        train with it."""
        return bool(self._waiting)

    def call(self, call: Call) -> Any:
        """Runs a call, or stops the script at it.

        Raises:
          ScriptStopped: the step is known.
        """
        noted = self.log.note(call)
        if self._collector is None:
            if self.known is not None:
                # The step is taken from the second iteration: in the first one, no call has made
                # the arguments yet.
                later = _skipping(self.known, 1)
                self._chosen, self._collector = self.known, StepCollector(later)
            elif (choice := self._decided(noted)) is not None:
                if self.may_stop(bool(self.wanted) or self._has_gradient(choice)):
                    self._start(choice)
                else:
                    self.has_gone_on = True
        if self._collector is not None:
            whole = self._collector.offer(call)
            if whole is not None:
                self.found = self._found(whole)
                stop_script()
        loop = noted.variant.facts.loop if noted.variant.facts is not None else None
        if loop is not None and _is_longest(noted, loop) and _is_long(noted.variant):
            self.on_long_loop()
        outputs = call.run()
        self.log.ran(noted, outputs)
        if self._collector is not None:
            self._collector.ran(outputs)
        return outputs

    def _start(self, choice: Choice) -> None:
        self._choice = choice
        functions = [self.log.functions[number] for number in choice.numbers]
        if len(functions) == 1:
            step = self._single(functions[0], choice)
        else:
            step = self._several(functions, choice)
        self._chosen, self._collector = step, StepCollector(_skipping(step, 0))

    def look_anew(self) -> None:
        """Leaves out all calls so far, as the step comes later."""
        self.log.leave_out()

    def ended(self) -> FoundStep | ScriptStep | None:
        """Returns what is known after the script has ended without being stopped.

        Returns:
          The step; or, if the call is no longer there, the description by which another run of the
            script finds it; or None.
        """
        self.log.end()
        candidates = self._candidates()
        choices = [
            (self._alone(candidate) if self.wanted else self._choice_of(candidates, number),
             candidate)
            for number, candidate in candidates.items()
            if candidate.calls > 1 and self._is_wanted(number)
        ]  # fmt: skip
        choice = best(choices)
        is_adder = choice is not None and choice.doubt is Doubt.NOTHING_TRAINED
        if choice is not None and not self.wanted and (is_adder or self._has_lasting(choice)):
            choice = self._in_rounds(choice, has_ended=True) or choice
        elif not self.wanted and (choice is None or choice.doubt >= Doubt.NO_GRADIENT):
            # Another function may add up what a gradient gives.
            heads = (number for number, one in candidates.items() if one.has_gradient)
            rounds = (round_of(self.log, number, has_ended=True) for number in heads)
            self._round = next((one for one in rounds if one is not None), None)
            if self._round is not None:
                numbers = self._round.numbers
                choice = Choice(numbers=numbers, doubt=Doubt.NONE, is_carried=True)
        loop = self._longest_loop()
        if loop is not None and (choice is None or choice.doubt >= Doubt.NO_GRADIENT):
            return self._found_loop(*loop)
        if choice is None or choice.doubt >= Doubt.NO_GRADIENT:
            choice = self._called_once() or choice
        if choice is None:
            return None
        # A circle begins with the function that the script calls first.
        head = min(choice.numbers, key=self.log.order.index)
        if head != choice.numbers[0] and self._round is None:
            choice = self._choice_of(candidates, head)
        functions = [self.log.functions[number] for number in choice.numbers]
        if len(functions) > 1:
            return self._several(functions, choice)
        variant = functions[0].usual
        if variant.described is None:
            if variant.refusal is not None:
                raise variant.refusal
            return None
        self._choice = choice
        return replace(
            self._found_single(functions[0], variant.described, choice),
            kept=variant.kept,
            source=variant.source,
        )

    def _called_once(self) -> Choice | None:
        """Finds, among the functions that were called once, the one that trains with the most bytes
        of arguments."""
        once = [
            function
            for function in self.log.functions
            if self._is_wanted(function.number)
            and function.number in self.log.order  # Not if its first call has failed.
            and self.log.takes_back(function)
        ]
        if not once:
            return None
        largest = max(once, key=lambda function: function.usual.bytes)
        return Choice(numbers=(largest.number,), doubt=Doubt.CALLED_ONCE, is_carried=True)

    def names(self) -> dict[str, SourceLine]:
        """Returns the names of the jitted functions that were called, each with the line of its
        first call."""
        found: dict[str, SourceLine] = {}
        for function in self.log.functions:
            found.setdefault(function.name, function.called_at)
        return found

    def names_inside(self) -> set[str]:
        """Returns the names of the jitted functions that these call, at any depth."""
        described = [
            variant.described for function in self.log.functions for variant in function.variants
        ]
        return {
            name
            for call in described
            if call is not None
            for name in names_inside(call.traced.jaxpr)
        }

    def without_state(self) -> dict[str, SourceLine]:
        """Returns those that are called repeatedly, without a result that stays or comes back."""
        candidates = self._candidates()
        found: dict[str, SourceLine] = {}
        for number, candidate in candidates.items():
            doubt = self._choice_of(candidates, number).doubt
            if candidate.calls > 1 and doubt is Doubt.NO_STATE:
                function = self.log.functions[number]
                found.setdefault(function.name, function.called_at)
        return found

    # Choosing.

    def _decided(self, noted: Noted) -> Choice | None:
        function = noted.function
        # The call of a rare variant would be taken for the step's, if the script was let go on.
        if noted.variant is not function.usual:
            return None
        candidates = self._candidates()
        mine = candidates.get(function.number)
        if mine is None:
            return None
        if self.wanted and "+" not in self.wanted:
            is_it = function.name == self.wanted and mine.calls >= 3 and is_usual(mine)
            return self._alone(mine) if is_it else None
        choice = self._choice_of(candidates, function.number)
        waits = self._may_be_in_rounds(choice, function, mine)
        (self._waiting.add if waits else self._waiting.discard)(function.number)
        is_adder = choice.doubt is Doubt.NOTHING_TRAINED
        rounds = self._in_rounds(choice) if is_adder or (waits and mine.has_gradient) else None
        choice = rounds or choice
        if self.wanted and self._name_of(choice) != self.wanted:
            return None
        if rounds is None and (waits or self._is_cut(choice, mine)):
            return None
        return choice if rounds is not None or is_enough(choice, mine) else None

    def _in_rounds(self, choice: Choice, *, has_ended: bool = False) -> Choice | None:
        """Returns the choice for a function that is called several times before another one takes
        the sum; None if it is not called so."""
        self._round = round_of(self.log, choice.numbers[0], has_ended=has_ended)
        if self._round is None:
            return None
        return Choice(numbers=self._round.numbers, doubt=Doubt.NONE, is_carried=True)

    def _may_be_in_rounds(self, choice: Choice, function: Function, mine: StepChoice) -> bool:
        """Whether a function may turn out to be called equally often before each call of another
        one, if the script goes on: a function that adds up, before the one that takes the sum; or a
        function that trains and gets arrays that another one may train, as a critic before its
        generator; or functions of which one takes gradients and another one adds them up."""
        if function.calls > CALLS_TO_SEE:
            return False
        if len(choice.numbers) > 1:
            return (choice.in_rounds or choice.is_cut) and mine.seconds < _LONGEST_CUT_S
        if choice.doubt is Doubt.NOTHING_TRAINED:
            return bool(self._taker(function))
        return self._has_lasting(choice) and mine.seconds < _LONGEST_FOR_OTHERS_S

    def _is_cut(self, choice: Choice, mine: StepChoice) -> bool:
        """Whether a function that belongs to the step was not called in the last iteration, and is
        waited for."""
        is_early = mine.calls <= _MOST_CUT_CALLS and mine.seconds < _LONGEST_CUT_S
        return choice.is_cut and is_early

    def _has_lasting(self, choice: Choice) -> bool:
        """Whether a single function that trains gets arrays that it does not change, and that
        another one may train."""
        if choice.doubt is not Doubt.NONE or not self.trains_often():
            return False
        number, *others = choice.numbers
        if others:
            return False
        mine = self._candidates()[number]
        made = sum(size for other, size in mine.from_others.items() if other != number)
        return mine.constant_bytes + made >= _LASTING_SHARE * mine.bytes

    def _choice_of(self, candidates: dict[int, StepChoice], number: int) -> Choice:
        return choice_of(candidates, number, self.log.last_iteration(number))

    def _has_gradient(self, choice: Choice) -> bool:
        facts = [self.log.functions[number].usual.facts for number in choice.numbers]
        return any(one is not None and one.has_gradient for one in facts)

    def _alone(self, candidate: StepChoice) -> Choice:
        number = candidate.number
        carried = candidate.from_others.get(number, 0) > 0
        return Choice(numbers=(number,), doubt=Doubt.NONE, is_carried=carried)

    def _name_of(self, choice: Choice) -> str:
        return "+".join(self.log.functions[number].name for number in dict.fromkeys(choice.numbers))

    def _is_wanted(self, number: int) -> bool:
        names = self.wanted.split("+") if self.wanted else []
        return not names or self.log.functions[number].name in names

    def _candidates(self) -> dict[int, StepChoice]:
        now = time.monotonic()
        found: dict[int, StepChoice] = {}
        for function in self.log.functions:
            variant = function.usual
            if variant.facts is None and variant.refusal is None:
                continue
            sizes: dict[int, int] = {}
            for size, origin, same in zip(
                variant.leaf_bytes, variant.origins, variant.unchanged, strict=True
            ):
                if origin is not None and not same:
                    sizes[origin.function] = sizes.get(origin.function, 0) + size
            constant = sum(
                size
                for size, same in zip(variant.leaf_bytes, variant.unchanged, strict=True)
                if same
            )
            replaced = (
                0
                if sizes
                else sum(variant.leaf_bytes[place] for place in self.log.replaced(variant))
            )
            found[function.number] = StepChoice(
                number=function.number,
                calls=function.counted if function.is_restless else variant.calls,
                all_calls=function.counted,
                has_gradient=variant.facts is not None and variant.facts.has_gradient,
                trains=variant.trains(function.number),
                bytes=variant.bytes,
                from_others=sizes,
                constant_bytes=constant,
                replaced_bytes=replaced,
                seconds=now - function.first_s,
            )
        return found

    def _longest_loop(self) -> tuple[Function, Variant, TrainingLoop] | None:
        """Finds, among the functions that were called once, the one whose loop does the most
        work."""
        found = [
            (function, variant, variant.facts.loop)
            for function in self.log.functions
            for variant in function.variants
            if function.counted == 1
            and self._is_wanted(function.number)
            and variant.facts is not None
            and variant.facts.loop is not None
            and variant.described is not None
        ]
        return max(found, key=lambda one: _flops(one[1]), default=None)

    # What is found.

    def _single(self, function: Function, choice: Choice) -> ScriptStep:
        variant = function.usual
        return ScriptStep(
            name=function.name,
            defined_at=function.defined_at,
            called_at=function.called_at,
            argument_bytes=variant.bytes,
            skipped=variant.first,
            carried=carried_runs(_fitting(variant, function.number)),
            calls=function.calls,
            flops=_flops(variant),
            doubt="" if self.wanted else self._doubt(function, choice),
            outside=() if choice.is_carried else variant.outside,
        )

    def _doubt(self, function: Function, choice: Choice) -> str:
        """Returns why a function may not be the step; for one that adds up gradients, also which
        function takes them."""
        taker = self._taker(function) if choice.doubt is Doubt.NOTHING_TRAINED else None
        if taker is None:
            return _DOUBTS[choice.doubt]
        return (
            f"it adds up what `{taker.name}` ({taker.called_at}) takes after every "
            f"{self._calls_between(function, taker)} calls"
        )

    def _taker(self, function: Function) -> Function | None:
        """Finds the function that takes the outputs of a given one, and is called less often."""
        for other in self.log.functions:
            taken = any(
                origin is not None and origin.function == function.number
                for origin in other.usual.last_origins
            )
            if other is not function and taken and other.calls < function.calls:
                return other
        return None

    def _calls_between(self, function: Function, other: Function) -> int:
        """Returns how many calls of a function there are for each call of another one, up to the
        last call of that other one."""
        order = self.log.order
        last = len(order) - 1 - order[::-1].index(other.number)
        until = order[: last + 1]
        return round(until.count(function.number) / until.count(other.number))

    def _several(self, functions: list[Function], choice: Choice) -> ScriptStep:
        is_apart = _hold_apart(functions)
        parts = tuple(
            StepPart(
                name=function.name,
                defined_at=function.defined_at,
                called_at=function.called_at,
                skipped=_skipped(function, is_apart=is_apart),
                kept=self._round.kept[place] if self._round else self._kept(functions, place),
                times=self._times(functions, function),
            )
            for place, function in enumerate(functions)
        )
        first = functions[0]
        return ScriptStep(
            name="+".join({one.number: one.name for one in functions}.values()),
            defined_at=first.defined_at,
            called_at=first.called_at,
            argument_bytes=0,
            parts=parts,
            calls=first.calls,
            flops=sum(_flops(function.usual) for function in functions),
            doubt="" if self.wanted else _DOUBTS[choice.doubt],
            outside=self._between(functions),
        )

    def _times(self, functions: list[Function], function: Function) -> int:
        """Returns how often a part is called for each call of the last part, where the step holds
        it once."""
        last = functions[-1]
        if functions.count(function) > 1 or function.calls <= 1.5 * last.calls + 1:
            return 1
        return self._calls_between(function, last)

    def _kept(self, functions: list[Function], place: int) -> tuple[int, ...]:
        """Returns the outputs of a part that come back in the next iteration, or that no other part
        takes."""
        mine = functions[place]
        variant = mine.usual
        if variant.facts is None:
            return ()
        taken: dict[int, bool] = {}
        for other, function in enumerate(functions):
            for origin in function.usual.last_origins:
                if origin is not None and origin.function == mine.number and origin.output >= 0:
                    again = other <= place
                    taken[origin.output] = taken.get(origin.output, False) or again
        return tuple(
            output for output in range(len(variant.facts.forwarded)) if taken.get(output, True)
        )

    def _between(self, functions: list[Function]) -> tuple[str, ...]:
        """Returns the names of arguments of a part that have the shapes of outputs of an earlier
        part, but were changed outside of jit in between."""
        found: dict[str, None] = {}
        for function in functions:
            call = function.usual.described
            for place in self._passed_on(functions, function) if call is not None else ():
                name = call.names[place] if call is not None and call.names else "gradients"
                found[name.partition("[")[0].partition(".")[0]] = None
        return tuple(found)

    def _passed_on(self, functions: list[Function], function: Function) -> list[int]:
        """Returns the leaves of a part's arguments that have the shapes of gradients of an earlier
        part, and that no part has returned."""
        numbers = [one.number for one in functions]
        variant = function.usual
        earlier = {
            form
            for other in functions[: functions.index(function)]
            if (facts := other.usual.facts) is not None and facts.has_gradient
            for form in output_forms(other.usual)
        }
        if variant.described is None or not earlier:
            return []
        return [
            place
            for place, (leaf, origin, same) in enumerate(
                zip(variant.described.leaves, variant.last_origins, variant.unchanged, strict=True)
            )
            if (origin is None or origin.function not in numbers)
            and not same
            and leaf_shape(leaf)
            and form_of(leaf) in earlier
        ]

    def _found(self, whole: TracedCall) -> FoundStep:
        collector, step = self._collector, self._chosen
        assert collector is not None
        assert step is not None
        if step.loop is not None:
            return self._assembled(step, whole, step.carried, set(), set())
        numbers = self._numbers(step)
        functions = [self.log.functions[number] for number in numbers]
        if len(set(numbers)) < len(numbers):
            known = arguments_of(self.log, numbers, collector.sources, _positions(step.parts))
            places = [
                known.placed.get(place, place_of(leaf)) for place, leaf in enumerate(whole.leaves)
            ]
            return self._assembled(
                step, whole, carried_runs(known.pairs), known.constant, known.parameters,
                placed=places,
            )  # fmt: skip
        if len(functions) == 1:
            choice = self._choice or self._alone(self._candidates()[numbers[0]])
            return self._found_single(functions[0], whole, choice)
        constant, parameters = set[int](), set[int]()
        pairs: list[tuple[int, int]] = []
        outputs = _positions(step.parts)
        placed = [place_of(leaf) for leaf in whole.leaves]
        for part, function, sources in zip(step.parts, functions, collector.sources, strict=True):
            variant = function.usual
            state = parameters_in(variant, function.number) | set(
                self._passed_on(functions, function)
            )
            for place, (origin, same, source) in enumerate(
                zip(variant.last_origins, variant.unchanged, sources, strict=True)
            ):
                if source is None:
                    continue
                placed[source] = variant.placed[place]
                if same:
                    constant.add(source)
                if place in state:
                    parameters.add(source)
                if origin is None or origin.function not in numbers:
                    continue
                if part.times > 1 and origin.function == function.number:
                    # The step holds one of several additions: each step begins with the same sum.
                    constant.add(source)
                else:
                    output = outputs.get((numbers.index(origin.function), origin.output))
                    if output is not None and (source, output) not in pairs:
                        pairs.append((source, output))
        return self._assembled(
            step, whole, carried_runs(pairs), constant, parameters, placed=placed
        )

    def _numbers(self, step: ScriptStep) -> list[int]:
        places = [(part.name, part.called_at) for part in step.parts] or [
            (step.name, step.called_at)
        ]
        by_place = {(one.name, one.called_at): one.number for one in self.log.functions}
        return [by_place[place] for place in places]

    def _found_single(self, function: Function, call: TracedCall, choice: Choice) -> FoundStep:
        step = self._single(function, choice)
        variant = function.usual
        constant = {place for place, same in enumerate(variant.unchanged) if same}
        parameters = parameters_in(variant, function.number)
        return self._assembled(
            step, call, step.carried, constant, parameters, placed=variant.placed
        )

    def _found_loop(self, function: Function, variant: Variant, loop: TrainingLoop) -> FoundStep:
        assert variant.described is not None
        turn, carried = described_turn(variant.described, loop)
        step = ScriptStep(
            name=function.name,
            defined_at=function.defined_at,
            called_at=function.called_at,
            argument_bytes=0,
            skipped=variant.first,
            # A loop that the script itself calls has no line in a program of the user.
            loop=LoopStep(at=loop.at if loop.at.file else function.called_at, turns=loop.turns),
            calls=function.calls,
            flops=_flops(variant) / max(loop.turns, 1),
        )
        runs = (Carried(output=0, argument=0, count=carried),)
        found = self._assembled(step, turn, runs, set(), set())
        return replace(found, kept=variant.kept, around=(variant.described, loop))

    def _assembled(
        self,
        step: ScriptStep,
        call: TracedCall,
        carried: tuple[Carried, ...],
        constant: set[int],
        parameters: set[int],
        placed: Sequence[Any] = (),
    ) -> FoundStep:
        """Puts together what is known of the step and its whole call.

        Args:
          constant: leaves of its arguments that are the same arrays in every call.
          parameters: leaves that are state even if they do not come back.
          placed: the placement of each leaf at the first call; empty for their present placement.
        """
        taken = frozenset(run.argument + offset for run in carried for offset in range(run.count))
        leaves = call.leaves
        names = {part.name for part in step.parts} or {step.name}
        return FoundStep(
            step=replace(
                step,
                carried=carried,
                argument_bytes=sum(map(leaf_bytes, leaves)),
            ),
            batch_axes=batch_axes(call, carried=taken | parameters, constant=frozenset(constant)),
            meshes=meshes_of(call),
            others=self._others(names),
            whole=call,
            placed=tuple(placed) or tuple(map(place_of, leaves)),
            notices=tuple(
                said
                for function in self.log.functions
                if function.name in names and (said := about_programs(function))
            ),
        )

    def _others(self, names: set[str]) -> tuple[ScriptStep, ...]:
        found = [
            self._single(function, Choice(numbers=(), doubt=Doubt.NONE, is_carried=True))
            for function in self.log.functions
            if function.name not in names and function.calls > 1
        ]
        return tuple(sorted(found, key=lambda one: -one.argument_bytes * one.calls))


def _hold_apart(functions: Sequence[Function]) -> bool:
    """Whether parts of a step hold the same arrays in the first round, and others later, as a
    target that begins as the parameters."""
    rounds = [function.usual.begun for function in functions]
    if len(set(map(id, functions))) < len(functions) or min(map(len, rounds)) < 2:
        return False
    # Python keeps one weak reference for each array.
    first, second = ({id(one) for calls in rounds for one in calls[place]} for place in (0, 1))
    return len(first) < len(second)


def _skipped(function: Function, *, is_apart: bool) -> int:
    """Returns how many calls of a part of a step other runs skip: also the first one of its usual
    variant, if parts hold the same arrays in it, and only such calls follow."""
    usual = function.usual
    is_steady = 1 < usual.calls == function.calls - usual.first
    return usual.first + 1 if is_apart and is_steady else usual.first


def _skipping(step: ScriptStep, calls: int) -> ScriptStep:
    """Returns the step with the number of earlier calls of each of its functions that are
    skipped."""
    parts = tuple(replace(part, skipped=calls) for part in step.parts)
    return replace(step, skipped=calls, parts=parts)


def _positions(parts: tuple[StepPart, ...]) -> dict[tuple[int, int], int]:
    """Maps each pair of a part and one of its outputs to the position of that output among those of
    the whole step."""
    kept = [(number, output) for number, part in enumerate(parts) for output in part.kept]
    return {one: place for place, one in enumerate(kept)}


def _flops(variant: Variant) -> float:
    return variant.facts.flops if variant.facts is not None else 0.0


def _is_longest(noted: Noted, loop: TrainingLoop) -> bool:
    """Whether this is the first call of a variant with more turns than all before it."""
    known = [one.facts for one in noted.function.variants if one is not noted.variant]
    turns = [one.loop.turns for one in known if one is not None and one.loop is not None]
    return noted.variant.calls == 1 and all(one < loop.turns for one in turns)


def _is_long(variant: Variant) -> bool:
    facts = variant.facts
    if facts is None or facts.loop is None:
        return False
    return facts.flops > _LONG_FLOPS or not facts.loop.turns


def _fitting(variant: Variant, number: int) -> list[tuple[int, int]]:
    """Returns the pairs of a leaf and an output of the same shape and type that come back, each
    output once."""
    outputs = output_forms(variant)
    leaves = variant.described.leaves if variant.described is not None else []
    return [
        (argument, output)
        for argument, output in variant.own_pairs(number)
        if argument < len(leaves)
        and output < len(outputs)
        and form_of(leaves[argument]) == outputs[output]
    ]


def meshes_of(call: TracedCall) -> tuple[Mesh, ...]:
    """Returns the meshes over which arguments of a call are split, or shall be split."""
    shardings = [getattr(leaf, "sharding", None) for leaf in call.leaves]
    shardings += call.settings.in_shardings
    meshes = [
        sharding.mesh
        for sharding in shardings
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    ]
    return tuple(dict.fromkeys(meshes))
