"""Decides which propagations of shardings the plans of a search need (pure functions)."""

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
# Dimensions that are not divided evenly, each with its divisor.
Uneven = frozenset[tuple[DivisibilityGuard, int]]
# Axes that do not divide evenly, with their sizes; axes whose size is in shapes; axes above a
# limit.
_Broken = tuple[Sizes, Active, Active]

PROBES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Plans with the same mapping and knobs, whose programs differ only in the sizes of axes.

    Attributes:
      call: mapping and knobs.
      rows: indices of the plans in the original list.
      batch: their meshes, in the order of `rows`.
      needs: one propagation for each set of active axes, without those of pipelines.
      pipelined: one propagation for each set of active axes and number of ranks, if the pipeline
        axis is larger than 1: the stages depend on the number of ranks.
    """

    call: Call
    rows: tuple[int, ...]
    batch: Batch
    needs: tuple[Need, ...]
    pipelined: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A propagation that plans need: of the step with these axes larger than 1.

    Attributes:
      call: mapping and knobs.
      sizes: sizes for the propagation, all small.
      probes: sizes of plans at which the terms must hold as well.
      spare: sizes of a plan, used if the step refuses `sizes`, which may be no plan's.
      members: rows of the group's batch that need this propagation.
      exact: True if the step must be lowered at `sizes` and not derived from other sizes, since
        some array does not divide evenly there, which jax may refuse.
      largest: the largest size of each axis in the plans.
      uneven: the uneven divisions of its meshes, if these are the reason why they need terms of
        their own.
      is_only_uneven: False if its meshes also break other assumptions of their first terms.
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
    """Groups plans by mapping and knobs, in the order of their first plans. Compiler options do not
    matter, since they change no terms."""
    rows: dict[Call, list[int]] = {}
    for row, plan in enumerate(plans):
        rows.setdefault(plan.call, []).append(row)
    return tuple(_group(call, members, plans) for call, members in rows.items())


def is_of(need: Need, plan: Plan) -> bool:
    """Whether a need has the call and the active axes of a plan. Not for pipelines, whose needs
    also depend on the ranks."""
    active = tuple(axis.name for axis in plan.axes if axis.size > 1)
    return need.call == plan.call and need.active == active


def refined_needs(
    need: Need, batch: Batch, members: Sequence[int], terms: Terms
) -> tuple[Need, ...]:
    """Returns new propagations for meshes at which the terms of a need do not hold.

    Meshes that break the same assumptions share one. If an array does not divide evenly, the axes
    that split it keep their sizes. An axis whose size is in shapes, or above a limit, gets the
    smallest remaining size. Every round covers at least the meshes at its own sizes, so the rounds
    end.
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
    """Returns one propagation for each mesh of `members`, at its own sizes; splits over granules
    share it."""
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
    """Returns the guarded dimensions that a mesh does not divide evenly."""
    numbers = {guard: math.prod(sizes[axis] for axis in guard.axes) for guard in terms.guards}
    return frozenset((guard, number) for guard, number in numbers.items() if guard.size % number)


def _broken(terms: Terms, sizes: Mapping[str, int]) -> _Broken:
    """Returns the assumptions of terms that a mesh breaks; first the sizes of axes that do not
    divide."""
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
    # Needs with most axes first: they take longest, and show most about the step.
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
    """Returns the sizes of plans that together differ from `base` in as many axes as possible."""
    chosen: list[NDArray[np.int64]] = []
    untried = np.ones(len(base), np.bool_)
    for _ in range(PROBES):
        news = ((distinct != base) & untried).sum(axis=1)
        if news.max() == 0:
            break
        # Among the sizes that change most axes, the most even one, since large sizes are rare.
        candidates = distinct[news == news.max()]
        probe = candidates[np.argmin(candidates.max(axis=1))]
        chosen.append(probe)
        untried &= probe == base
    return chosen


def _named(active: Active, sizes: NDArray[np.int64]) -> Sizes:
    return tuple(zip(active, sizes.tolist(), strict=True))


# Propagations of pipelines that differ only in their schedule: the programs of their stages are the
# same, and only the order of actions differs (no jax).


def name_of(need: Need) -> str:
    """Returns the schedule in a need's call of `build`; empty if there is none."""
    return str(dict(need.call[1]).get(SCHEDULE, ""))


def without_schedule(need: Need) -> Hashable:
    """Returns a key that is equal for needs that differ only in the schedule."""
    mapping, knobs = need.call
    ranks = dict(need.sizes)[PIPELINE]
    return mapping, tuple(knob for knob in knobs if knob[0] != SCHEDULE), need.active, ranks


def under_schedule(made: Propagation, need: Need, asked: Need) -> Propagation | None:
    """Derives the answer to a need from the answer to one with another schedule.

    Args:
      made: the answer to `asked`.

    Returns:
      The answer; None if the need takes a propagation of its own, because the step does not run the
      schedule that the knob names, or because the schedules have different kinds of actions.
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
