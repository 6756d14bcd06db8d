"""Finds the role of each array in the training from the data flow of one iteration (jax).

A parameter is carried and changed by its own gradient. A moment is carried, and the parameter is
computed from it other than through a loss. A copy is carried and computed from the parameter
itself, but the parameter is not computed from it. A statistic is carried without a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from automesh.program.capture.flow.program import Flow, follow, is_literal, opened_jaxpr
from automesh.program.infer.copies import bits, places_of, without_copies
from automesh.program.infer.nouns import Role
from automesh.program.infer.operation import ArrayOrigin, Shape

_TRAINED = frozenset({Role.PARAMETER, Role.MOMENT, Role.COPY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of the inputs of a program, held arrays first.

    Attributes:
      inputs, results: role of each input and result.
      of: for inputs, the input that each belongs to: the parameter of a moment or a copy.
      state_of: for inputs, the result that replaces each.
      floats: inputs of floats that are not carried.
      integers: matrices of integers that are not carried, or come back unchanged.
      made_of: for inputs that are replaced, the inputs that what replaces each is computed from
        other than through a gradient, as a bit mask.
      observed: inputs that the other results are computed from, as a bit mask.
    """

    inputs: tuple[Role, ...]
    results: tuple[Role, ...]
    of: Mapping[int, int]
    state_of: Mapping[int, int]
    floats: frozenset[int]
    integers: frozenset[int]
    made_of: Mapping[int, int]
    observed: int

    @property
    def has_trained(self) -> bool:
        """Whether a gradient trains any parameter."""
        return Role.PARAMETER in self.inputs

    def made(self) -> list[ArrayOrigin]:
        """Returns the origin of each input, for the walk."""
        state = {*_TRAINED}
        if not self.has_trained:
            state.add(Role.STATISTIC)
        found: list[ArrayOrigin] = []
        for role in self.inputs:
            if role in state:
                found.append(ArrayOrigin.STATE)
            else:
                found.append(ArrayOrigin.RANDOM if role == Role.KEY else ArrayOrigin.DATA)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Array:
    shape: Shape
    is_float: bool
    is_key: bool


def roles_of(jaxpr: Any, carried: Mapping[int, int]) -> Roles:
    """Returns the roles of all inputs and results.

    Args:
      carried: for inputs, with held arrays, the result that replaces each in the next iteration.
    """
    opened = opened_jaxpr(jaxpr)
    arrays = [_array(var) for var in opened.invars]
    outputs, after = follow(
        opened,
        [Flow(made_of=1 << place, direct=1 << place) for place in range(len(arrays))],
        into_loops=True,
    )
    keys = _keys(opened)
    places = {var: place for place, var in enumerate(opened.invars)}
    # A mutable array is replaced by its own new content.
    flows = {place: outputs[result] for place, result in carried.items()}
    for place, flow in enumerate(after):
        if place not in flows and flow.made_of != 1 << place:
            flows[place] = flow
    unchanged = {
        place
        for place, result in carried.items()
        if not is_literal(opened.outvars[result]) and places.get(opened.outvars[result]) == place
    }
    parameters = [
        place
        for place, flow in flows.items()
        if arrays[place].is_float and flow.through >> place & 1 and place not in unchanged
    ]
    shapes = [one.shape for one in arrays]
    parameters = without_copies(parameters, shapes, flows, opened)
    samples = _samples(parameters, arrays, flows, keys)
    parameters = [place for place in parameters if place not in samples]
    into_parameters = 0
    for place in parameters:
        into_parameters |= flows[place].direct & ~(1 << place)
    into_parameters = _closed(into_parameters, flows, set(parameters))
    used = _used(outputs, flows, opened, places)
    is_parameter = set(parameters)
    roles = [
        _role(place, array, flows, unchanged, keys, is_parameter, into_parameters, used)
        for place, array in enumerate(arrays)
    ]
    for place, role in enumerate(roles):
        if place in samples:
            roles[place] = Role.STATISTIC
        elif role == Role.STATISTIC and _is_early_copy(place, arrays, flows, is_parameter):
            roles[place] = Role.COPY
    if parameters:
        for place, role in _untrained(arrays, flows, roles, outputs, carried).items():
            roles[place] = role
    of = _owners(roles, arrays, flows, parameters)
    results = _results(opened, roles, carried, outputs)
    floats = frozenset(
        place for place, array in enumerate(arrays) if array.is_float and place not in flows
    )
    integers = frozenset(
        place
        for place, array in enumerate(arrays)
        if roles[place] == Role.DATA and not array.is_float and len(array.shape) > 1
    )
    return Roles(
        inputs=tuple(roles),
        results=results,
        of=of,
        state_of=dict(carried),
        floats=floats,
        integers=integers,
        made_of={place: flow.direct for place, flow in flows.items()},
        observed=_observed(outputs, set(carried.values())),
    )


def _closed(into: int, flows: Mapping[int, Flow], parameters: set[int]) -> int:
    """Returns the inputs that parameters are computed from in this iteration or, by way of a
    moment, in the next: statistics of gradients, of which an optimizer makes the bases for its next
    step."""
    rest = into
    while rest:
        more = 0
        for place in places_of(rest):
            if place in flows and place not in parameters:
                more |= flows[place].direct & ~(1 << place)
        rest = more & ~into
        into |= more
    return into


def _untrained(
    arrays: Sequence[_Array],
    flows: Mapping[int, Flow],
    roles: Sequence[Role],
    outputs: Sequence[Flow],
    carried: Mapping[int, int],
) -> dict[int, Role]:
    """Returns the roles of carried arrays that are made of each other alone, and of no gradient:
    frozen weights, whose steps an optimizer sets to zero; or, if nothing else is made of them,
    parameters that the loss is not computed from, with their moments."""
    counters = bits(place for place, role in enumerate(roles) if role == Role.COUNTER)
    own = {
        place
        for place in flows
        if roles[place] == Role.STATISTIC and arrays[place].is_float and not flows[place].through
    }
    while True:
        known = bits(own) | counters
        kept = {place for place in own if not flows[place].made_of & ~known}
        if kept == own:
            break
        own = kept
    used = _observed(outputs, set(carried.values()))
    for place, flow in flows.items():
        used |= 0 if place in own else flow.made_of
    rest = used & bits(own)
    while rest:  # What a used one is made of is used, too.
        more = 0
        for place in places_of(rest):
            more |= flows[place].made_of & bits(own)
        rest = more & ~used
        used |= more
    return {place: Role.FROZEN if used >> place & 1 else Role.DEAD for place in own}


def _array(variable: Any) -> _Array:
    aval: Any = variable.aval
    dtype = getattr(aval, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    return _Array(
        shape=tuple(getattr(aval, "shape", ())),
        is_float=dtype is not None and not is_key and jnp.issubdtype(dtype, jnp.inexact),
        is_key=is_key,
    )


def _keys(jaxpr: Any) -> set[int]:
    """Returns the inputs whose words become random keys."""
    found = {place for place, var in enumerate(jaxpr.invars) if _array(var).is_key}
    places = {var: place for place, var in enumerate(jaxpr.invars)}

    def look(program: Any, inside: Mapping[Any, int]) -> None:
        for equation in program.eqns:
            name = equation.primitive.name
            if name in ("random_wrap", "rng_bit_generator"):
                var = equation.invars[0]
                if not is_literal(var) and var in inside:
                    found.add(inside[var])
                continue
            for body in core.jaxprs_in_params(equation.params):
                opened = opened_jaxpr(body)
                # Operands that a body does not get come first.
                count = min(len(opened.invars), len(equation.invars))
                pairs = zip(opened.invars[-count:], equation.invars[-count:]) if count else ()
                given = {
                    mine: inside[yours]
                    for mine, yours in pairs
                    if not is_literal(yours) and yours in inside
                }
                if given:
                    look(opened, given)

    look(jaxpr, places)
    return found


def _used(
    outputs: Sequence[Flow],
    flows: Mapping[int, Flow],
    jaxpr: Any,
    places: Mapping[Any, int],
) -> int:
    """Returns the inputs from which any result is computed, except unchanged copies of
    themselves."""
    used = 0
    for flow, var in zip(outputs, jaxpr.outvars, strict=True):
        if is_literal(var) or var not in places:
            used |= flow.made_of
    for place, flow in flows.items():
        used |= flow.made_of & ~(1 << place)
    return used


def _role(
    place: int,
    array: _Array,
    flows: Mapping[int, Flow],
    unchanged: set[int],
    keys: set[int],
    parameters: set[int],
    into_parameters: int,
    used: int,
) -> Role:
    if place in keys:
        return Role.KEY
    if place in unchanged:
        if not used >> place & 1:
            return Role.DEAD
        return Role.FROZEN if array.is_float and array.shape else Role.DATA
    if place not in flows:
        if not used >> place & 1:
            return Role.DEAD
        return Role.DATA if array.shape or array.is_float else Role.COUNTER
    if place in parameters:
        return Role.PARAMETER
    if not array.shape and not (array.is_float and flows[place].made_of & ~(1 << place)):
        return Role.COUNTER
    # A number without dimensions may be a rate or the scale of a loss, which no gradient makes.
    is_of_gradient = bool(array.shape) or bool(flows[place].through)
    if array.is_float and is_of_gradient and into_parameters >> place & 1:
        return Role.MOMENT  # Also a statistic that gradients are multiplied with.
    return Role.COPY if array.is_float and flows[place].through else Role.STATISTIC


def _is_early_copy(
    place: int, arrays: Sequence[_Array], flows: Mapping[int, Flow], parameters: set[int]
) -> bool:
    """Whether a statistic is a copy of one parameter that is moved before that is replaced, as a
    momentum encoder is: it is computed from that and itself alone."""
    made_of = [
        other for other in places_of(flows[place].direct & ~(1 << place)) if arrays[other].shape
    ]
    return (
        arrays[place].is_float
        and len(made_of) == 1
        and made_of[0] in parameters
        and arrays[made_of[0]].shape == arrays[place].shape
    )


def _samples(
    parameters: Sequence[int], arrays: Sequence[_Array], flows: Mapping[int, Flow], keys: set[int]
) -> set[int]:
    """Returns what looks like a parameter and is samples that follow a gradient, as the walkers and
    chains of Langevin dynamics do: they move by noise as well, no data moves them, and parameters
    that do not move by noise learn from them."""
    noise = bits(keys)
    given = bits(
        place
        for place, one in enumerate(arrays)
        if place not in flows and one.shape and place not in keys
    )
    noisy = [place for place in parameters if flows[place].direct & noise]
    taught = 0
    for place in parameters:
        taught |= 0 if place in noisy else flows[place].through
    return {
        one
        for one in noisy
        if taught >> one & 1 and not (flows[one].direct | flows[one].through) & given
    }


def _owners(
    roles: Sequence[Role],
    arrays: Sequence[_Array],
    flows: Mapping[int, Flow],
    parameters: Sequence[int],
) -> dict[int, int]:
    """Returns the parameter of each moment and of each copy; the first one with the same shape."""
    found: dict[int, int] = {}
    moments = bits(place for place, role in enumerate(roles) if role == Role.MOMENT)
    for parameter in parameters:
        for place in places_of(flows[parameter].direct & moments):
            if arrays[place].shape == arrays[parameter].shape:
                found.setdefault(place, parameter)
                moments &= ~(1 << place)
    every = bits(parameters)
    for place, role in enumerate(roles):
        if role != Role.COPY:
            continue
        for parameter in places_of(flows[place].direct & every):
            if arrays[place].shape == arrays[parameter].shape:
                found[place] = parameter
                break
    return found


def _observed(outputs: Sequence[Flow], replacing: set[int]) -> int:
    """Returns the inputs that results which replace nothing, such as a loss, are computed from."""
    found = 0
    for number, flow in enumerate(outputs):
        found |= 0 if number in replacing else flow.made_of
    return found


def _results(
    jaxpr: Any, roles: Sequence[Role], carried: Mapping[int, int], flows: Sequence[Flow]
) -> tuple[Role, ...]:
    replaces = {result: place for place, result in carried.items()}
    found: list[Role] = []
    for number, var in enumerate(jaxpr.outvars):
        array = _array(var) if not is_literal(var) else None
        if number in replaces:
            found.append(roles[replaces[number]])
        elif array is not None and array.is_float and not array.shape and flows[number].made_of:
            found.append(Role.LOSS)
        else:
            found.append(Role.OUTPUT)
    return tuple(found)
