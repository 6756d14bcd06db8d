"""Finds the mesh axes over which a script splits its batch (jax).

The batch consists of the arguments that are new in every step, and of what is computed from them
without parameters. Its rows may lie in any dimension: behind one of micro-batches, or behind one of
time. It may also be split inside the step alone, by a sharding constraint or by `shard_map`.

What is computed with parameters, such as a hidden layer, has rows, too, beside features that other
axes split. An axis that a constraint names for the same dimension as an axis of the batch, such as
fsdp in P(("dp", "fsdp"), "tp"), splits rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding

from automesh.program.capture.flow.program import is_literal, opened_jaxpr
from automesh.program.capture.step_call import TracedCall
from automesh.program.lower.static_args import leaf_dtype, leaf_shape
from automesh.program.spec_entries import entries_of

_CONSTRAINTS = frozenset({"sharding_constraint", "reshard"})


def batch_axes(
    call: TracedCall, *, carried: frozenset[int], constant: frozenset[int]
) -> tuple[str, ...]:
    """Returns the axes that split the batch of a step, in the order in which they are found.

    Args:
      carried: leaves of the arguments that the step replaces.
      constant: leaves that are the same arrays in every call. They may be data as well as frozen
        parameters, so they count only if no new leaf is split.
    """
    leaves = call.leaves
    new = [place for place in range(len(leaves)) if place not in carried | constant]
    found = _split_by(call, new)
    if not found:
        found = _split_by(call, sorted(constant - carried))
    parameters = {
        place for place in carried if np.issubdtype(_plain(leaf_dtype(leaves[place])), np.inexact)
    }
    count = len(call.settings.constants)
    kinds = [_Made()] * count + [
        _Made(is_parameter=place in parameters, is_new=place not in parameters | constant)
        for place in range(len(leaves))
    ]
    seen = _Constraints()
    _walk(opened_jaxpr(call.traced.jaxpr), kinds, seen)
    return _with_shared((*found, *seen.of_batch), seen.shared)


def _with_shared(axes: Sequence[str], shared: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Adds the axes that split a dimension together with one of `axes`, until there are no more.

    >>> _with_shared(["dp"], [("fsdp", "sp"), ("dp", "fsdp"), ("tp",)])
    ('dp', 'fsdp', 'sp')
    """
    found = dict.fromkeys(axes)
    while fresh := [
        name
        for names in shared
        if not found.keys().isdisjoint(names)
        for name in names
        if name not in found
    ]:
        found |= dict.fromkeys(fresh)
    return tuple(found)


def _plain(dtype: Any) -> Any:
    return np.uint32 if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else _numpy(dtype)


def _numpy(dtype: Any) -> Any:
    """Returns a type as numpy's `issubdtype` can judge it; bfloat16 and its kin are no floating
    types for numpy."""
    return np.float32 if jax.numpy.issubdtype(dtype, np.floating) else dtype


def _split_by(call: TracedCall, places: Sequence[int]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    stated = call.settings.in_shardings
    for place in places:
        leaf = call.leaves[place]
        own = getattr(leaf, "sharding", None)
        for sharding in (own, stated[place] if place < len(stated) else None):
            if isinstance(sharding, NamedSharding) and leaf_shape(leaf):
                found |= dict.fromkeys(_names(sharding.spec))
    return tuple(found)


def _names(spec: Any) -> Iterator[str]:
    for names in _names_of_dimensions(spec):
        yield from names


def _names_of_dimensions(spec: Any) -> Iterator[tuple[str, ...]]:
    for entry in entries_of(spec or ()):
        names = entry if isinstance(entry, tuple) else (entry,)
        yield tuple(name for name in names if isinstance(name, str))


@dataclass(frozen=True, slots=True)
class _Constraints:
    """The mesh axes that constraints inside a step name.

    Attributes:
      of_batch: axes that split the batch, in the order in which they are found.
      shared: axes that split one dimension of a value that is computed from the batch, and maybe
        also from parameters.
    """

    of_batch: dict[str, None] = field(default_factory=dict[str, None])
    shared: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])

    def note(self, made: _Made, spec: Any) -> None:
        """Notes how a value is split."""
        if made.is_batch:
            self.of_batch.update(dict.fromkeys(_names(spec)))
        elif made.is_new:
            self.shared.extend(_names_of_dimensions(spec))


@dataclass(frozen=True, slots=True)
class _Made:
    """The inputs that a value is computed from: parameters, or arguments that are new in every
    step."""

    is_parameter: bool = False
    is_new: bool = False

    @property
    def is_batch(self) -> bool:
        return self.is_new and not self.is_parameter


def _walk(jaxpr: Any, inputs: Sequence[_Made], seen: _Constraints) -> list[_Made]:
    """Returns what each output of a program is computed from, and notes how the program splits the
    batch and what is computed from it."""
    known: dict[Any, _Made] = dict(zip(jaxpr.invars, inputs, strict=True))

    def made_of(variable: Any) -> _Made:
        return _Made() if is_literal(variable) else known.get(variable, _Made())

    for equation in jaxpr.eqns:
        given = [made_of(variable) for variable in equation.invars]
        name = equation.primitive.name
        if name in _CONSTRAINTS:
            seen.note(given[0], _constraint(equation))
        if name == "shard_map":
            for one, spec in zip(given, equation.params.get("in_specs", ())):
                seen.note(one, spec)
        together = _Made(
            is_parameter=any(one.is_parameter for one in given),
            is_new=any(one.is_new for one in given),
        )
        made = [together] * len(equation.outvars)
        for body in map(opened_jaxpr, core.jaxprs_in_params(equation.params)):
            count = len(body.invars)
            # The body lacks the first operands where they are the equation's own, as the predicate
            # of a branch.
            fitting = given[-count:] if 0 < count <= len(given) else [together] * count
            outputs = _walk(body, fitting, seen)
            if name in ("jit", "pjit", "closed_call", "core_call"):
                made = outputs
        known.update(zip(equation.outvars, made, strict=True))
    return [made_of(variable) for variable in jaxpr.outvars]


def _constraint(equation: Any) -> Any:
    sharding = equation.params.get("sharding") or equation.params.get("dst_sharding")
    return sharding.spec if isinstance(sharding, NamedSharding) else ()
