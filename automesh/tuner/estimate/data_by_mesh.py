"""Finds out whether the step takes another amount of data on each mesh.

`build` may make its batch for its mesh, as `rows = per_device * mesh.size`. Then a step time is the
time for another amount of work on each mesh, and only the time per element of the data compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from automesh.mesh.axes import Plan
from automesh.outcomes import Estimated
from automesh.program.nouns import SizedArray
from automesh.tuner.estimate.buildable import built_as


@dataclass(frozen=True, slots=True, kw_only=True)
class DataByMesh:
    """Two texts about a step that takes another amount of data on each mesh.

    Attributes:
      clause: short, to stand next to the answer of a search.
      notice: a sentence with the argument, its shapes, and what to do.
    """

    clause: str
    notice: str


def data_by_mesh(
    data: Mapping[Plan, Sequence[SizedArray]], estimates: Mapping[Plan, Estimated]
) -> DataByMesh | None:
    """Compares the data of the plans that were built; returns None if they do not differ.

    Plans with different knobs are not compared: a knob may be the number of rows itself.

    Args:
      data: for each plan that was built, the arguments that are not carried on.
      estimates: of plans; those that were built are ranked by time per element.
    """
    plans = list(data)
    pairs = [
        pair
        for place, one in enumerate(plans)
        for other in plans[place + 1 :]
        if one.call == other.call and (pair := _pair(one, data[one], other, data[other]))
    ]
    if not pairs:
        return None
    widest = max(pairs, key=lambda pair: pair.times)
    more, less, name = widest.more, widest.less, widest.name
    sizes = {plan: size for plan in plans if (size := _elements(data[plan], name))}
    clause = f"the step takes {widest.text}: time per row decides"
    notice = (
        f"`{name}` depends on the mesh: {widest.shapes}, so the step works on {widest.times:.3g} "
        f"times as much data on {more} as on {less}; plans are ranked by the time of a step, which "
        "does not compare them: divide it by the rows, or give `build` the same batch on all meshes"
    )
    seconds = {
        plan: one.step_s / sizes[built_as(plan)]
        for plan, one in estimates.items()
        if built_as(plan) in sizes and one.step_s > 0
    }
    if len(seconds) > 1:
        first = min(seconds, key=lambda plan: seconds[plan])
        notice += f"; by the estimates, {first} takes the least time per row of those listed"
    return DataByMesh(clause=clause, notice=notice)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two plans with different amounts of data, and the argument that differs most."""

    more: Plan
    less: Plan
    name: str
    times: float
    text: str
    shapes: str


def _pair(
    one: Plan, mine: Sequence[SizedArray], other: Plan, theirs: Sequence[SizedArray]
) -> _Pair | None:
    # Rows may be divided otherwise among micro-batches: the work is the same then.
    if sum(map(_size, mine)) == sum(map(_size, theirs)):
        return None
    known = {array.name: array for array in theirs}
    found = [
        (array, known[array.name])
        for array in mine
        if array.name in known and _size(array) != _size(known[array.name])
    ]
    found = [pair for pair in found if all(map(_size, pair))]
    if not found:
        return None
    first, second = max(found, key=lambda pair: max(map(_size, pair)))
    if _size(first) < _size(second):
        one, other, first, second = other, one, second, first
    return _Pair(
        more=one,
        less=other,
        name=first.name,
        times=_size(first) / _size(second),
        text=f"{_amount(first, second)} on {one} and {_amount(second, first)} on {other}",
        shapes=f"{first.dtype}{list(first.shape)} on {one}, and {list(second.shape)} on {other}",
    )


def _amount(array: SizedArray, other: SizedArray) -> str:
    """Says how many rows an array has, in words; its shape if more than one dimension differs."""
    if len(array.shape) == len(other.shape):
        changed = [a for a, b in zip(array.shape, other.shape, strict=True) if a != b]
        if len(changed) == 1:
            return f"{changed[0]:,} rows"
    return f"{list(array.shape)}"


def _size(array: SizedArray) -> int:
    return math.prod(array.shape)


def _elements(arrays: Sequence[SizedArray], name: str) -> int:
    return next((_size(array) for array in arrays if array.name == name), 0)
