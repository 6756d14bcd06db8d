"""Which propagations of shardings the plans of a search need (pure functions)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from automesh.cost.pipeline.terms import ScheduleText
from automesh.cost.terms import DivisibilityGuard, Terms
from automesh.errors import UsageError
from automesh.mesh.axes import PIPELINE, Call, Plan
from automesh.mesh.plan_arrays import Batch, batch_of
from automesh.program.nouns import Propagation
from automesh.space.pipelines import SCHEDULE

Sizes = tuple[tuple[str, int], ...]
Active = tuple[str, ...]
# Dimensions that are not divided evenly, each with the number that they are divided by.
Uneven = frozenset[tuple[DivisibilityGuard, int]]
# Axes that do not divide, with their sizes; axes whose size is in the shapes; axes beyond a limit.
_Broken = tuple[Sizes, Active, Active]

PROBES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Plans with the same mapping and knobs, whose programs differ in the sizes of axes alone.

    Attributes:
      call: mapping and knobs.
      rows: places of the plans in the list that they came from.
      batch: their meshes, in the order of `rows`.
      needs: one propagation per set of active axes, those of pipelines left out.
      pipelined: one per set of active axes and number of ranks, where the axis of pipelines is
        larger than 1: the stages of a pipeline depend on how many there are.
    """

    call: Call
    rows: tuple[int, ...]
    batch: Batch
    needs: tuple[Need, ...]
    pipelined: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One propagation: the step with these axes larger than 1.

    Attributes:
      call: mapping and knobs.
      sizes: to propagate with, all small.
      probes: sizes that occur, at which the terms must hold too.
      spare: sizes of a plan, for a step that refuses `sizes`, which need be no plan's.
      members: rows of the group's batch that it serves.
      exact: True if the step must be lowered at `sizes`, however alike its programs were elsewhere:
        some array does not divide evenly there, which jax may refuse.
      largest: of each axis, the largest size that occurs.
      uneven: what its meshes divide unevenly, if that is why they need terms of their own.
      is_only_uneven: False if other assumptions of the terms that they were priced with are
        broken, too.
    """

    call: Call
    active: Active
    sizes: Sizes
    probes: tuple[Sizes, ...]
    spare: Sizes
    members: tuple[int, ...]
    exact: bool = False
    largest: Sizes = ()
    uneven: Uneven = frozenset()
    is_only_uneven: bool = True


def groups_of(plans: Sequence[Plan]) -> tuple[Group, ...]:
    """The plans by mapping and knobs, in the order of their first plans; compiler options change no
    terms."""
    rows: dict[Call, list[int]] = {}
    for row, plan in enumerate(plans):
        rows.setdefault(plan.call, []).append(row)
    return tuple(_group(call, members, plans) for call, members in rows.items())


def is_of(need: Need, plan: Plan) -> bool:
    """Whether a need among those of a group has the call and the active axes of a plan; pipelines
    aside, whose needs depend on their ranks, too."""
    active = tuple(axis.name for axis in plan.axes if axis.size > 1)
    return need.call == plan.call and need.active == active


def refined_needs(
    need: Need, batch: Batch, members: Sequence[int], terms: Terms
) -> tuple[Need, ...]:
    """Propagations for meshes at which the terms of a need do not hold, and why not.

    Meshes that break the same assumptions share one: where an array does not divide evenly, the
    axes that split it are taken as they are; an axis whose size is in the shapes, or is beyond a
    limit, is tried again at the smallest size that is left. Every round settles at least the
    meshes at its own sizes, so this ends.
    """
    classes: dict[_Broken, list[int]] = {}
    rows = {member: dict(zip(batch.names, batch.sizes[member].tolist())) for member in members}
    for member, sizes in rows.items():
        classes.setdefault(_broken(terms, sizes), []).append(member)
    found: list[Need] = []
    for (exact, fixed, limits), alike in classes.items():
        made = _need(need.call, batch.names, batch.sizes, np.array(alike))
        if set(alike) == set(need.members) and made.sizes == need.sizes:
            found += own_needs(need, batch, alike)
            continue
        uneven = _uneven(terms, rows[alike[0]])
        found.append(
            replace(
                made,
                exact=bool(exact),
                uneven=uneven,
                is_only_uneven=not (fixed or limits),
            )
        )
    return tuple(found)


def own_needs(need: Need, batch: Batch, members: Sequence[int]) -> list[Need]:
    """A propagation for each mesh of `members`, at its own sizes; splits over granules share it."""
    shared: dict[Sizes, list[int]] = {}
    columns = [batch.names.index(axis) for axis in need.active]
    for member in members:
        sizes = _named(need.active, batch.sizes[member, columns])
        shared.setdefault(sizes, []).append(member)
    return [
        Need(
            call=need.call,
            active=need.active,
            sizes=sizes,
            probes=(),
            spare=sizes,
            members=tuple(rows),
            exact=True,
            largest=sizes,
        )
        for sizes, rows in shared.items()
    ]


def _uneven(terms: Terms, sizes: Mapping[str, int]) -> Uneven:
    """What a mesh divides unevenly of the arrays that the terms name."""
    numbers = {guard: math.prod(sizes[axis] for axis in guard.axes) for guard in terms.guards}
    return frozenset((guard, number) for guard, number in numbers.items() if guard.size % number)


def _broken(terms: Terms, sizes: Mapping[str, int]) -> _Broken:
    """Which assumptions of terms a mesh breaks; first the sizes of axes that do not divide."""
    uneven = {axis for guard, _ in _uneven(terms, sizes) for axis in guard.axes}
    sampled = dict(terms.sampled)
    return (
        tuple((axis, sizes[axis]) for axis in sorted(uneven)),
        tuple(axis for axis in terms.fixed if sizes[axis] != sampled[axis]),
        tuple(axis for axis, limit in terms.limits if sizes[axis] > limit),
    )


def _group(call: Call, rows: Sequence[int], plans: Sequence[Plan]) -> Group:
    batch = batch_of([plans[row] for row in rows])
    sizes = batch.sizes
    alike = (sizes > 1).astype(np.int64)
    if PIPELINE in batch.names:
        column = batch.names.index(PIPELINE)
        alike[:, column] = sizes[:, column]
    masks, inverse = np.unique(alike, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    needs = [
        _need(call, batch.names, sizes, np.flatnonzero(inverse == index))
        for index in range(len(masks))
    ]
    # Those with most axes first: they take longest, and say most about the step.
    needs.sort(key=lambda need: (-len(need.active), need.active))
    return Group(
        call=call,
        rows=tuple(rows),
        batch=batch,
        needs=tuple(need for need in needs if PIPELINE not in need.active),
        pipelined=tuple(need for need in needs if PIPELINE in need.active),
    )


def _need(
    call: Call, names: Sequence[str], sizes: NDArray[np.int64], members: NDArray[np.int64]
) -> Need:
    mine = sizes[members]
    columns = np.flatnonzero(mine[0] > 1)
    active = tuple(names[column] for column in columns.tolist())
    distinct = np.unique(mine[:, columns], axis=0)
    base = distinct.min(axis=0) if len(columns) else np.ones(0, np.int64)
    spare = distinct[np.argmin(distinct.max(axis=1))] if len(columns) else base
    probes = [_named(active, probe) for probe in _probes(distinct, base)] if len(columns) else []
    return Need(
        call=call,
        active=active,
        sizes=_named(active, base),
        probes=tuple(probes),
        spare=_named(active, spare),
        members=tuple(members.tolist()),
        largest=_named(active, distinct.max(axis=0) if len(columns) else base),
    )


def _probes(distinct: NDArray[np.int64], base: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Sizes that occur and together differ from `base` in as many axes as possible."""
    chosen: list[NDArray[np.int64]] = []
    untried = np.ones(len(base), np.bool_)
    for _ in range(PROBES):
        news = ((distinct != base) & untried).sum(axis=1)
        if news.max() == 0:
            break
        # Of those that try most axes at another size, the most even one: large sizes are rare.
        candidates = distinct[news == news.max()]
        probe = candidates[np.argmin(candidates.max(axis=1))]
        chosen.append(probe)
        untried &= probe == base
    return chosen


def _named(active: Active, sizes: NDArray[np.int64]) -> Sizes:
    return tuple(zip(active, sizes.tolist(), strict=True))


# Propagations of pipelines that differ in their schedule alone: the programs of their stages are
# the same, and only what is done when is not (no jax).


def name_of(need: Need) -> str:
    """What a need's call of `build` says about the schedule; empty if it says nothing."""
    return str(dict(need.call[1]).get(SCHEDULE, ""))


def without_schedule(need: Need) -> Hashable:
    """What needs have in common that differ in the schedule alone."""
    mapping, knobs = need.call
    ranks = dict(need.sizes)[PIPELINE]
    return mapping, tuple(knob for knob in knobs if knob[0] != SCHEDULE), need.active, ranks


def under_schedule(made: Propagation, need: Need, asked: Need) -> Propagation | None:
    """The answer to a need, from the answer to one with another schedule.

    Args:
      made: the answer to `asked`.

    Returns:
      None if it takes a propagation of its own: the step does not run what the knob names, or the
      other schedule has actions that this one has not.
    """
    pipeline, name = made.pipeline, name_of(need)
    if pipeline is None or pipeline.schedule.lines or pipeline.schedule.name != name_of(asked):
        return None
    text: ScheduleText = replace(pipeline.schedule, name=name)
    try:
        schedule = text.schedule()
    except UsageError:
        return None
    last = schedule.num_stages - 1
    for action in (action for actions in schedule.ranks for action in actions):
        kinds = dict(pipeline.kinds[pipeline.stages[action.stage]].programs)
        is_part_of_backward = action.kind == "F" and action.stage == last
        if action.kind not in kinds and not is_part_of_backward:
            return None
    return replace(made, pipeline=replace(pipeline, schedule=text))
