"""Separates parameters from arrays that follow them: target networks, kept gradients, and the
momentum of a gradient that is taken ahead of them (jax)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from automesh.program.capture.flow.program import Flow, is_backward, is_literal, takes_gradients
from automesh.program.infer.operation import Shape, shape_of


def without_copies(
    parameters: Sequence[int], shapes: Sequence[Shape], flows: Mapping[int, Flow], jaxpr: Any
) -> list[int]:
    """Returns the parameters among arrays that a gradient reaches.

    A target is used in the gradient of other parameters, so it is computed from that, too; but it
    is computed from another parameter, which its gradient has moved, and which is not computed from
    it. A gradient that an optimizer keeps for its next step is computed from the gradient of a
    parameter, which has moved by the kept one; but no gradient of a kept one moves that.

    Parameters whose gradient is taken ahead of them, where their momentum leads (Nesterov), look
    like a copy of that momentum, which has moved by its gradient. But no data meet the momentum
    alone.

    Args:
      parameters: inputs that are carried, and made of a gradient that they are in.
      shapes: shape of each input.
      flows: for inputs that are replaced, what replaces each.
    """
    ahead = _ahead(parameters, shapes, flows, jaxpr)
    of_shape: dict[Shape, int] = {}
    for place in parameters:
        of_shape[shapes[place]] = of_shape.get(shapes[place], 0) | 1 << place

    def alike(place: int, others: int) -> Iterator[int]:
        return places_of(others & of_shape[shapes[place]] & ~(1 << place))

    def is_copy(place: int) -> bool:
        flow = flows[place]
        return any(
            not flows[other].direct >> place & 1 and (place, other) not in ahead
            for other in alike(place, flow.direct & flow.through)
        )

    def is_kept(place: int) -> bool:
        flow = flows[place]
        return any(
            (flows[other].direct & ~flows[other].through) >> place & 1
            for other in alike(place, flow.through & ~flow.direct)
        )

    momenta = {momentum for _, momentum in ahead}
    return [
        place
        for place in parameters
        if place not in momenta and not is_copy(place) and not is_kept(place)
    ]


def _ahead(
    parameters: Sequence[int], shapes: Sequence[Shape], flows: Mapping[int, Flow], jaxpr: Any
) -> set[tuple[int, int]]:
    """Returns the pairs of parameters and their momenta: the parameter is replaced by what is made
    of both, and before its gradient the momentum meets nothing but the parameter."""
    every = bits(parameters)
    pairs = {
        (place, other)
        for place in parameters
        for other in places_of(flows[place].direct & flows[place].through & every)
        if other != place
        and shapes[other] == shapes[place]
        and not flows[other].direct >> place & 1
    }
    if not pairs:
        return set()
    alone = _meeting_data(jaxpr, {other for _, other in pairs}, pairs)
    return {pair for pair in pairs if pair not in alone}


def _meeting_data(
    jaxpr: Any, those: set[int], pairs: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Returns the pairs whose second one meets anything else without the first one.

    A number without dimensions, such as a factor that depends on a counter, is nothing to meet.
    """
    firsts: dict[int, int] = {}
    for place, other in pairs:
        firsts[other] = firsts.get(other, 0) | 1 << place
    watched = bits(those)
    kept = watched | bits(place for place, _ in pairs)
    found: set[tuple[int, int]] = set()
    made: dict[Any, int] = {
        variable: 1 << place if kept >> place & 1 or shape_of(variable) else 0
        for place, variable in enumerate(jaxpr.invars)
    }
    # Of the watched that a value is made of, those of which a first one is missing. Few values have
    # any: before a gradient a momentum soon meets its parameter, and a copy soon meets data.
    lonely = {variable: mask & watched for variable, mask in made.items() if mask & watched}
    # Behind a gradient, what it moves meets all that it is made of.
    behind: set[Any] = set()
    for equation in jaxpr.eqns:
        given = [one for one in equation.invars if not is_literal(one)]
        if is_backward(equation) or not behind.isdisjoint(given):
            behind.update(equation.outvars)
            continue
        together = functools.reduce(operator.or_, (made.get(one, 0) for one in given), 0)
        left = 0
        for one in given:
            own = made.get(one, 0)
            for other in places_of(lonely.get(one, 0) & watched):
                missing = firsts[other] & ~own
                if together & ~(own | firsts[other]):
                    found |= {(first, other) for first in places_of(missing)}
                    if missing == firsts[other]:
                        watched &= ~(1 << other)
                elif firsts[other] & ~together:
                    left |= 1 << other
        if takes_gradients(equation):
            behind.update(equation.outvars)
            continue
        made.update(dict.fromkeys(equation.outvars, together))
        if left & watched:
            lonely.update(dict.fromkeys(equation.outvars, left & watched))
    return found


def bits(places: Iterable[int]) -> int:
    """Returns a number with these bits set."""
    found = 0
    for place in places:
        found |= 1 << place
    return found


def places_of(number: int) -> Iterator[int]:
    """Yields the positions of the set bits, the lowest first."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
