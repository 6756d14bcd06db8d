"""Chooses those of the functions that a script calls which are its training step (no jax).

State flows through the step: its outputs come back as its arguments, directly or through other
functions that are called in the same iteration. All functions of such a circle are one step.
Evaluation, sampling and averages of parameters may also form a circle (a total, a cache), but they
take no gradient, or no gradient of what they carry, as sums of gradients are carried without one.
The less a function looks like a step, the longer the script is left to run, as a better candidate
may come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

# Bytes of state: a function with less of it carries a counter, a total or a random key.
_LEAST_BYTES = 1024
# Share of its lasting arguments that a function has to replace, to be a step without doubt.
_CHANGED_SHARE = 0.5
# Calls of a function after which its variant with the most calls is taken for its usual one.
_MANY_CALLS = 24


class Doubt(IntEnum):
    """The degree to which a function does not look like a training step."""

    NONE = 0
    NOTHING_TRAINED = 1
    NO_GRADIENT = 2
    LITTLE_STATE = 3
    CALLED_ONCE = 4
    # No parameters either, that stay the same from call to call: part of what a step does.
    NO_STATE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patience:
    """The limit up to which the script is left to run: so many calls of the usual variant and so
    many seconds, or `most` calls."""

    calls: int
    seconds: float
    most: int


# Scripts may fill buffers and evaluate models in many calls before the training begins.
_PATIENCE = {
    Doubt.NONE: _Patience(calls=3, seconds=0, most=3),
    Doubt.NOTHING_TRAINED: _Patience(calls=12, seconds=0, most=12),
    Doubt.NO_GRADIENT: _Patience(calls=8, seconds=5, most=100),
    Doubt.LITTLE_STATE: _Patience(calls=40, seconds=20, most=400),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """The properties of a function's usual variant by which it is chosen as the step.

    Attributes:
      calls: number of calls of the usual variant.
      all_calls: number of calls of all variants.
      has_gradient: whether there is a backward pass in it.
      trains: whether an argument comes back to it with an update that was made from its gradient.
      bytes: bytes of its arguments.
      from_others: by the number of a function (its own number included), bytes of the arguments
        that this function has newly made.
      constant_bytes: bytes of the arguments that are the same arrays in every call.
      replaced_bytes: bytes of the arguments that have the shapes of its outputs and change from
        call to call, though no jitted function makes them.
      seconds: since its first call.
    """

    number: int
    calls: int
    all_calls: int
    has_gradient: bool
    trains: bool
    bytes: int
    from_others: Mapping[int, int]
    constant_bytes: int
    replaced_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Functions that are one step together.

    Attributes:
      numbers: the functions, in the order in which an iteration calls them.
      is_carried: whether their outputs come back to them.
      in_rounds: whether none of them trains by itself, and a function that changes the parameters
        is called less often than the others.
      is_cut: whether one of them adds up gradients, and a function that their state flows through
        was not called in the last iteration.
    """

    numbers: tuple[int, ...]
    doubt: Doubt
    is_carried: bool
    in_rounds: bool = False
    is_cut: bool = False


def circle_of(candidates: Mapping[int, StepChoice], number: int) -> set[int]:
    """Returns the functions through which state flows in a circle with a given one; only that one
    if there is no circle."""
    forward = _reached(candidates, number, backward=False)
    return (forward & _reached(candidates, number, backward=True)) | {number}


def _reached(candidates: Mapping[int, StepChoice], number: int, *, backward: bool) -> set[int]:
    found: set[int] = set()
    left = [number]
    while left:
        at = left.pop()
        if backward:
            following = set(candidates[at].from_others)
        else:
            following = {
                other for other, candidate in candidates.items() if at in candidate.from_others
            }
        left += [other for other in following - found if other in candidates]
        found |= following
    return found


def choice_of(
    candidates: Mapping[int, StepChoice], number: int, iteration: Sequence[int]
) -> Choice:
    """Returns the functions that are one step together with a given one, and how much they look
    like a step.

    Args:
      iteration: the functions that were called in the last iteration, this one first.
    """
    mine = candidates[number]
    circle = circle_of(candidates, number)
    # Where the script changes gradients outside of jit before they are applied, the circle is open.
    # The function that carries state and makes the parameters from it belongs to the circle all the
    # same.
    if mine.has_gradient:
        circle |= {
            other
            for other in mine.from_others
            if other in candidates and candidates[other].from_others.get(other, 0) >= _LEAST_BYTES
        }
    adders = _adders(candidates, circle)
    takers = {other for other in circle if _ends_rounds(candidates, other, adders - {other})}
    numbers = tuple(
        other
        for other in iteration
        if other in circle
        and iteration.count(other) == 1
        and (
            _as_often(candidates[other], mine)
            or _takes_sums(candidates, other, number)
            or other in takers
        )
    ) or (number,)
    members = [candidates[other] for other in numbers]
    carried = sum(
        size for member in members for other, size in member.from_others.items() if other in numbers
    )
    is_open = len(numbers) > 1 and not any(member.trains for member in members)
    return Choice(
        numbers=numbers,
        doubt=_doubt(members, carried),
        is_carried=carried > 0,
        in_rounds=is_open and bool(takers),
        is_cut=is_open and bool(adders) and not circle <= set(numbers),
    )


def _takes_sums(candidates: Mapping[int, StepChoice], other: int, number: int) -> bool:
    """Whether a function may take the sum, made outside of jit, of the gradients that another one
    returns: no function takes these gradients themselves."""
    is_taken = any(number in one.from_others for one in candidates.values())
    mine, taker = candidates[number], candidates[other]
    return (
        mine.has_gradient
        and not is_taken
        and not taker.has_gradient
        and taker.from_others.get(other, 0) >= _LEAST_BYTES
        and taker.all_calls < mine.all_calls
    )


def _adders(candidates: Mapping[int, StepChoice], circle: set[int]) -> set[int]:
    """Returns the functions of a circle that add up what functions with a gradient return. An
    optimizer is none: those functions take the parameters that it returns."""
    heads = [other for other in circle if candidates[other].has_gradient]
    return {
        other
        for other in circle
        if not candidates[other].has_gradient
        and candidates[other].from_others.get(other, 0) >= _LEAST_BYTES
        and any(head in candidates[other].from_others for head in heads)
        and not any(other in candidates[head].from_others for head in heads)
    }


def _ends_rounds(candidates: Mapping[int, StepChoice], other: int, adders: set[int]) -> bool:
    """Whether a function changes the parameters after several calls of the others: it takes no
    gradient, keeps a state of its own, and takes what another function has added up."""
    taker = candidates[other]
    return (
        not taker.has_gradient
        and taker.from_others.get(other, 0) >= _LEAST_BYTES
        and any(
            adder in taker.from_others and taker.all_calls < candidates[adder].all_calls
            for adder in adders
        )
    )


def _as_often(other: StepChoice, mine: StepChoice) -> bool:
    """Whether both are called once in an iteration; the last one may be unfinished."""
    return abs(other.all_calls - mine.all_calls) <= 1 + mine.all_calls // 4


def _doubt(members: Sequence[StepChoice], carried: int) -> Doubt:
    constant = sum(member.constant_bytes for member in members)
    gradient = any(member.has_gradient for member in members)
    replaced = sum(member.replaced_bytes for member in members if member.has_gradient)
    changed = carried + replaced
    if any(member.trains for member in members):
        return Doubt.NONE
    if not (changed or constant or gradient):
        return Doubt.NO_STATE
    if not changed or (changed < _LEAST_BYTES and (constant > changed or not gradient)):
        return Doubt.LITTLE_STATE
    if not gradient:
        is_mostly_constant = changed <= _CHANGED_SHARE * (changed + constant)
        return Doubt.LITTLE_STATE if is_mostly_constant else Doubt.NO_GRADIENT
    # Where several functions pass state on in a circle, it is enough that one of them trains it.
    trains = replaced > 0 or len(members) > 1
    return Doubt.NONE if trains else Doubt.NOTHING_TRAINED


def is_usual(candidate: StepChoice) -> bool:
    """Whether the variant is called in most of a function's calls; or in more than any other one,
    where the script has gone on for long: batches of several lengths have no usual one."""
    return 2 * candidate.calls > candidate.all_calls or candidate.all_calls >= _MANY_CALLS


def is_enough(choice: Choice, candidate: StepChoice) -> bool:
    """Whether there were enough calls to stop the script at this one."""
    patience = _PATIENCE.get(choice.doubt)
    if patience is None or not is_usual(candidate) or candidate.calls < patience.calls:
        return False
    return candidate.seconds >= patience.seconds or candidate.calls >= patience.most


def best(choices: Sequence[tuple[Choice, StepChoice]]) -> Choice | None:
    """Returns the functions that look most like the step once the script has ended: first those in
    the least doubt, among these the one whose calls have the most bytes; None if none has state."""
    ranked = sorted(
        (one for one in choices if one[0].doubt is not Doubt.NO_STATE),
        key=lambda one: (one[0].doubt, not one[0].is_carried, -one[1].bytes * one[1].calls),
    )
    return ranked[0][0] if ranked else None
