"""Finds rounds of calls that are one step together: a function that adds up gradients is called
several times, then another one takes the sum (jax).

The gradients may also be made by one function and added up by another one. Each function is called
from one line, so the calls of a round are recognized by their order and by which outputs each call
takes from the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automesh.program.capture.flow.calls import CallLog, Origin, parameters_in

# The most calls of one function in a round: each of them is traced and compiled with the step.
_MOST_TURNS = 8
CALLS_TO_SEE = 2 * _MOST_TURNS + 1
"""Number of calls of a function after which two whole rounds have been seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationRound:
    """The calls that are one step.

    Attributes:
      numbers: their functions, in the order of the calls.
      kept: per call, the positions of the outputs that the next round takes, or that no call takes.
    """

    numbers: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoundCall:
    """A call in the log, with its position there."""

    at: int
    number: int
    origins: Sequence[Origin | None]

    def takes_from(self, number: int) -> bool:
        """Whether one of its arguments was made by a function."""
        return any(one is not None and one.function == number for one in self.origins)


def round_of(log: CallLog, adder: int, *, has_ended: bool = False) -> AccumulationRound | None:
    """Returns the round that begins with the calls of a function; None unless the last two rounds
    were alike.

    Args:
      adder: the function that is called several times, and is called first in a round.
      has_ended: whether the script has ended, so that the last round may be complete.
    """
    calls = [_RoundCall(at=at, number=log.order[at], origins=origins) for at, origins in log.recent]
    takers = {call.number for call in calls if call.number != adder and call.takes_from(adder)}
    members = _members(calls, adder)
    givers = {
        number for number in members - {adder}
        if any(call.number == adder and call.takes_from(number) for call in calls)
    }  # fmt: skip
    # A function that adds up is called several times in a row. Where another function adds up what
    # this one returns, only those that give this one its parameters end a round.
    for ends, is_in_row in ((takers, True), (givers, False)):
        starts = _starts(calls, adder, ends)
        for all_starts in (starts, [*starts, len(calls)]) if has_ended else (starts,):
            found = _alike(log, calls, all_starts, adder, is_in_row=is_in_row)
            if found is not None:
                return found
    return None


def _alike(
    log: CallLog,
    calls: Sequence[_RoundCall],
    starts: Sequence[int],
    adder: int,
    *,
    is_in_row: bool,
) -> AccumulationRound | None:
    if len(starts) < 3:
        return None
    before, last = calls[starts[-3] : starts[-2]], calls[starts[-2] : starts[-1]]
    members = _members([*before, *last], adder)
    first, second = ([one for one in calls if one.number in members] for calls in (before, last))
    numbers = tuple(one.number for one in second)
    turns = numbers.count(adder)
    others = numbers[turns:]
    is_round = 2 <= turns <= _MOST_TURNS and numbers == tuple(one.number for one in first)
    if is_in_row:
        is_round &= set(numbers[:turns]) == {adder} and 0 < len(others) == len(set(others))
    else:
        is_round &= numbers.count(numbers[-1]) == 1 and len(numbers) <= CALLS_TO_SEE
    return AccumulationRound(numbers=numbers, kept=_kept(log, first, second)) if is_round else None


@dataclass(slots=True)
class RoundArguments:
    """The facts about the arguments of a whole round.

    Attributes:
      pairs: (argument, output of the round before that is this argument).
      constant: the arguments that are the same in every round.
      parameters: the arguments that are state, even if they do not come back.
      placed: per argument, its placement at the first call of its function.
    """

    pairs: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    constant: set[int] = field(default_factory=set[int])
    parameters: set[int] = field(default_factory=set[int])
    placed: dict[int, Any] = field(default_factory=dict[int, Any])


def arguments_of(
    log: CallLog,
    numbers: Sequence[int],
    sources: Sequence[Sequence[int | None]],
    outputs: Mapping[tuple[int, int], int],
) -> RoundArguments:
    """Returns what is known of the arguments of the last round.

    Args:
      numbers: the functions of the round.
      sources: per call and leaf of its arguments, the argument of the round that it is.
      outputs: for each pair of a call and one of its outputs, the output of the round that it is.
    """
    calls = [(at, origins) for at, origins in log.recent if log.order[at] in numbers]
    mine, before = calls[-len(numbers) :], calls[: -len(numbers)][-len(numbers) :]
    places = {at: place for place, (at, _) in enumerate(before)}
    found = RoundArguments()
    for number, (_, origins), taken in zip(numbers, mine, sources, strict=True):
        variant = log.functions[number].usual
        state = parameters_in(variant, number)
        for place, (origin, source) in enumerate(zip(origins, taken, strict=True)):
            if source is None:
                continue
            found.placed[source] = variant.placed[place]
            if place in state:
                found.parameters.add(source)
            if origin is None:
                if variant.unchanged[place]:
                    found.constant.add(source)
                continue
            output = outputs.get((places.get(origin.call, -1), origin.output))
            if output is not None and (source, output) not in found.pairs:
                found.pairs.append((source, output))
    return found


def _starts(calls: Sequence[_RoundCall], adder: int, takers: set[int]) -> list[int]:
    """Returns the calls of the adder that begin a round: the first call, and those that follow the
    call of a function that takes the sum."""
    found: list[int] = []
    is_over = True
    for place, call in enumerate(calls):
        if call.number == adder and is_over:
            found.append(place)
        is_over = call.number in takers or (is_over and call.number != adder)
    return found or [0]


def _members(calls: Sequence[_RoundCall], adder: int) -> set[int]:
    """Returns the functions of a round: those that the outputs of the adding function (`adder`) go
    through before they come back to it."""
    after, before = {adder}, {adder}
    size = 0
    while size < len(after) + len(before):
        size = len(after) + len(before)
        after |= {one.number for one in calls if any(map(one.takes_from, after))}
        takers = [one for one in calls if one.number in before]
        before |= {one.number for one in calls if any(two.takes_from(one.number) for two in takers)}
    return after & before


def _kept(log: CallLog, before: Sequence[_RoundCall], last: Sequence[_RoundCall]) -> tuple[
    tuple[int, ...], ...
]:  # fmt: skip
    inside = {
        (one.call, one.output)
        for call in last
        for one in call.origins
        if one is not None and one.call >= last[0].at
    }
    places = {call.at: place for place, call in enumerate(before)}
    again = {
        (places[one.call], one.output)
        for call in last
        for one in call.origins
        if one is not None and one.call in places
    }
    kept: list[tuple[int, ...]] = []
    for place, call in enumerate(last):
        facts = log.functions[call.number].usual.facts
        forwarded = facts.forwarded if facts is not None else ()
        kept.append(
            tuple(
                output
                for output, source in enumerate(forwarded)
                if (place, output) in again or (source is None and (call.at, output) not in inside)
            )
        )
    return tuple(kept)
