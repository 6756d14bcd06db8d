"""Propagations of pipelines that differ in their schedule alone: the programs of their stages are
the same, and only what is done when is not (no jax)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from automesh.cost.pipeline.terms import ScheduleText
from automesh.errors import UsageError
from automesh.mesh.axes import PIPELINE
from automesh.program.nouns import Propagation
from automesh.space.pipelines import SCHEDULE
from automesh.tuner.estimate.propagations import Need


def name_of(need: Need) -> str:
    """What a need's call of `build` says about the schedule; empty if it says nothing."""
    return str(dict(need.call[1]).get(SCHEDULE, ""))


def without_schedule(need: Need) -> Hashable:
    """What needs have in common that differ in the schedule alone."""
    mapping, knobs = need.call
    ranks = dict(need.sizes)[PIPELINE]
    return mapping, tuple(one for one in knobs if one[0] != SCHEDULE), need.active, ranks


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
