"""Finds the classes of a captured step: dimensions that must be split alike, roles of arrays, and
cautions (jax)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from automesh.program.capture.flow.program import constants_in, opened_jaxpr, training_steps
from automesh.program.capture.nouns import Carried
from automesh.program.capture.step_call import TracedCall
from automesh.program.infer.activations import activations_of
from automesh.program.infer.cautions import cautions_of, divided_of, inner_of
from automesh.program.infer.dimensions import Dim, DimensionMark, Dimensions, Dims
from automesh.program.infer.facts import Facts, facts_of, outer, roots
from automesh.program.infer.legality import legality_of
from automesh.program.infer.naming import join_labels, names_of
from automesh.program.infer.nouns import ArrayClasses, DimensionClass, Role, StepClasses
from automesh.program.infer.operation import shape_of
from automesh.program.infer.parallel import join_kernels, join_parallel, join_twins, one_of_a_kind
from automesh.program.infer.roles import Roles, roles_of
from automesh.program.infer.walk import Walked, walk

_WEIGHTS = frozenset({Role.PARAMETER, Role.FROZEN})
_TRAINED = frozenset({Role.PARAMETER, Role.MOMENT, Role.COPY, Role.STATISTIC})


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlatProgram:
    """A program whose constants are its first inputs; its equations keep their numbers."""

    invars: list[Any]
    constvars: tuple[Any, ...]
    eqns: list[Any]
    outvars: list[Any]


def step_classes(call: TracedCall, carried: Sequence[Carried]) -> StepClasses:
    """Finds the classes of a step that was captured from a script.

    Args:
      carried: leaves of its results that are leaves of its arguments in the next call.
    """
    pairs = {
        run.argument + offset: run.output + offset for run in carried for offset in range(run.count)
    }
    return classes_of(
        call.traced.jaxpr,
        num_held=len(call.settings.constants),
        carried=pairs,
        names=call.names,
    )


def classes_of(
    jaxpr: Any,
    *,
    num_held: int = 0,
    carried: Mapping[int, int],
    names: Sequence[str] = (),
    turns: int | None = None,
) -> StepClasses:
    """Finds the classes of a step.

    Args:
      jaxpr: the step, traced.
      num_held: number of leading inputs that are arrays of the step itself and no arguments, like
        its constants.
      carried: for leaves of the arguments, the leaf of the results that replaces each in the next
        iteration.
      names: the user's names of the arguments.
      turns: training steps in a call; 0 if only a run shows it. By default found from its loops.
    """
    given = opened_jaxpr(jaxpr)
    if turns is None:
        turns = training_steps(given)
    num_held += len(given.constvars)
    opened = _FlatProgram(
        invars=[*given.constvars, *given.invars],
        constvars=(),
        eqns=given.eqns,
        outvars=given.outvars,
    )
    constants = constants_in(jaxpr)
    roles = roles_of(opened, {place + num_held: result for place, result in carried.items()})
    walked = walk(opened, roles.made(), num_held=num_held, constants=constants)
    if known := _graded(walked, roles) or _evolved(walked, roles):
        inputs = tuple(known.get(place, role) for place, role in enumerate(roles.inputs))
        roles = replace(roles, inputs=inputs)
        walked = walk(opened, roles.made(), num_held=num_held, constants=constants)
    every, events = walked.all, walked.events
    for place, result in roles.state_of.items():
        every.join_all(walked.inputs[place], walked.outputs[result])
    facts, after = facts_of(
        every,
        events,
        walked.inputs,
        roles.inputs,
        floats=roles.floats,
        integers=roles.integers,
    )
    called = _called(opened, names, num_held)
    weights = [
        (name, dims)
        for name, dims, role in zip(called, walked.inputs, after, strict=True)
        if role in _WEIGHTS and names  # Numbers of our own carry no information.
    ]
    join_parallel(every, facts, weights)
    join_twins(every, facts, weights)
    join_kernels(every, facts)
    facts = _found_again(every, facts)
    arrays = list(zip(walked.inputs, after, strict=True))
    join_labels(every, events, facts, arrays)
    facts = _found_again(every, facts)
    wanted = _ranked(every, facts, walked.inputs, walked.outputs)
    named = names_of(every, events, facts, arrays, wanted)
    inputs = [
        _array(every, named, called[place], after[place], opened.invars[place], dims, roles, place)
        for place, dims in enumerate(walked.inputs)
    ]
    results = _results(every, named, opened, walked.outputs, roles, after, called)
    paired = list(zip(inputs, walked.inputs, strict=True))
    inner = inner_of(every, events, facts, named) + divided_of(every, events, facts, named)
    step = StepClasses(
        classes=_classes(every, facts, named, wanted, walked.inputs, after),
        arguments=tuple(_shifted(array, num_held) for array in inputs[num_held:]),
        held=tuple(inputs[:num_held]),
        results=results,
        inner=inner,
        activations=activations_of(every, events, facts, named),
        cautions=cautions_of(every, events, facts, named, paired, results, turns=turns),
        steps_per_call=turns,
        loss=next((place for place, one in enumerate(results) if one.role == Role.LOSS), None),
    )
    return one_of_a_kind(step)


def _graded(walked: Walked, roles: Roles) -> dict[int, Role]:
    """Returns the parameters of a step that itself trains nothing: the inputs whose gradients are
    results, as of a jitted loss with its gradients, whose parameters change outside of it."""
    if any(role in _TRAINED for role in roles.inputs):
        return {}
    every = walked.all
    backward = {every.factors(dim) for dim in walked.events.backward}

    def form(dims: Dims) -> tuple[tuple[int, ...], ...]:
        return tuple(every.factors(dim) for dim in dims)

    results = {form(dims) for dims in walked.outputs if dims}
    made = {one for one in results if all(not part or part in backward for part in one)}
    return {
        place: Role.PARAMETER
        for place in roles.floats
        if any(own := form(walked.inputs[place])) and own in made
    }


def _evolved(walked: Walked, roles: Roles) -> dict[int, Role]:
    """Returns the roles of what an evolution strategy trains, without any gradient: parameters, for
    which the step draws noise for each of a population, and moments, of which it makes them."""
    every = walked.all

    def form(dims: Dims) -> tuple[tuple[int, ...], ...]:
        return tuple(every.factors(dim) for dim in dims)

    if roles.has_trained:
        return {}
    noise = {
        form(one.dims[1:]) for one in walked.events.draws if one.is_random and all(one.dims[:1])
    }
    carried = {
        place: form(walked.inputs[place])
        for place, role in enumerate(roles.inputs)
        if role == Role.STATISTIC and place in roles.made_of and walked.inputs[place]
    }
    # The fitness is computed from parameters, and not from their moments.
    return {
        place: Role.MOMENT if roles.observed and not roles.observed >> place & 1 else Role.PARAMETER
        for place, own in carried.items()
        if own in noise
    }


def _called(opened: Any, names: Sequence[str], num_held: int) -> list[str]:
    count = len(opened.invars) - num_held
    given = list(names) if len(names) == count else [f"args[{place}]" for place in range(count)]
    return [*(f"held[{place}]" for place in range(num_held)), *given]


def _found_again(every: Dimensions, facts: Facts) -> Facts:
    """Finds the facts again, after more factors were joined."""

    def again(those: Iterable[int]) -> set[int]:
        return roots(every, [(one,) for one in those])

    return Facts(
        weights=again(facts.weights),
        backward=again(facts.backward),
        batches=list(dict.fromkeys(root for one in facts.batches for root in again([one]))),
        edges=again(facts.edges),
        nodes=again(facts.nodes),
        graphs=again(facts.graphs),
        data_sets=again(facts.data_sets),
        acted=again(facts.acted),
        shuffled=facts.shuffled,
        pooled=again(facts.pooled),
        mixed=again(facts.mixed),
        is_trained=facts.is_trained,
    )


def _ranked(
    every: Dimensions,
    facts: Facts,
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
) -> list[int]:
    """Orders the classes of arguments and batches: batches first, then the classes with the most
    elements."""
    weight: Counter[int] = Counter(dict.fromkeys(facts.batches, 0))
    for dims in (*inputs, *outputs):
        size = math.prod(every.size_of(every.factors(dim)) for dim in dims)
        for dim in dims:
            root = outer(every, dim)
            if root is not None and not every.marks(root) & DimensionMark.KEY:
                weight[root] += size
                for _, piece in every.packed(root):
                    inside = outer(every, piece)
                    if inside is not None:
                        weight[inside] += 0
    batches = set(facts.batches)
    # Ties in the order of the arguments: numbers of factors differ between releases of jax.
    place = {root: number for number, root in enumerate(weight)}
    return sorted(weight, key=lambda root: (root not in batches, -weight[root], place[root]))


def _dims(every: Dimensions, named: Mapping[int, str], dims: Dims) -> tuple[str, ...]:
    return tuple(
        named.get(root, "") if (root := outer(every, dim)) is not None else "" for dim in dims
    )


def _array(
    every: Dimensions,
    named: Mapping[int, str],
    name: str,
    role: Role,
    variable: Any,
    dims: Dims,
    roles: Roles,
    place: int,
) -> ArrayClasses:
    return ArrayClasses(
        name=name,
        role=role,
        shape=shape_of(variable),
        dtype=_dtype(variable),
        dims=_dims(every, named, dims),
        state_of=roles.state_of.get(place),
        of=roles.of.get(place),
    )


def _shifted(array: ArrayClasses, num_held: int) -> ArrayClasses:
    """Returns the array with indices that count arguments only, without held arrays."""
    return array if array.of is None else replace(array, of=array.of - num_held)


def _dtype(variable: Any) -> str:
    dtype = getattr(variable.aval, "dtype", None)
    return str(np.dtype(dtype)) if isinstance(dtype, np.dtype) else str(dtype or "")


def _results(
    every: Dimensions,
    named: Mapping[int, str],
    opened: Any,
    outputs: Sequence[Dims],
    roles: Roles,
    after: Sequence[Role],
    called: Sequence[str],
) -> tuple[ArrayClasses, ...]:
    replaces = {result: place for place, result in roles.state_of.items()}
    found: list[ArrayClasses] = []
    for number, (variable, dims) in enumerate(zip(opened.outvars, outputs, strict=True)):
        place = replaces.get(number)
        found.append(
            ArrayClasses(
                name=called[place] if place is not None else f"results[{number}]",
                role=after[place] if place is not None else roles.results[number],
                shape=shape_of(variable),
                dtype=_dtype(variable),
                dims=_dims(every, named, dims),
            )
        )
    return tuple(found)


def _classes(
    every: Dimensions,
    facts: Facts,
    named: Mapping[int, str],
    wanted: Sequence[int],
    inputs: Sequence[Dims],
    roles: Sequence[Role],
) -> tuple[DimensionClass, ...]:
    whole_sizes: dict[int, list[int]] = {}
    for dims, role in zip(inputs, roles, strict=True):
        for dim in dims if role not in (Role.DATA, Role.KEY) else ():
            root = outer(every, dim)
            if root is not None:
                whole_sizes.setdefault(root, []).append(every.size_of(every.factors(dim)))
    found: list[DimensionClass] = []
    for root in wanted:
        sizes = whole_sizes.get(root, [every.size(root)])
        legal = legality_of(every, facts, root, of=max(sizes))
        found.append(
            DimensionClass(
                name=named[root],
                size=every.size(root),
                parts=legal.parts,
                stored=1 if root in facts.data_sets else math.gcd(*sizes),
                whole=legal.whole,
                cure=legal.cure,
                pieces=_pieces(every, named, root),
                is_batch=root in facts.batches,
            )
        )
    return tuple(found)


def _pieces(every: Dimensions, named: Mapping[int, str], root: int) -> tuple[tuple[str, int], ...]:
    def name(dim: Dim) -> str:
        inside = outer(every, dim)
        return named.get(inside, "") if inside is not None else ""

    return tuple((name(dim), size) for (_, size), dim in every.packed(root))
