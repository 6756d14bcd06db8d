"""The work of a pipeline's stages, as formulas in the sizes of the other mesh axes (no jax)."""

from __future__ import annotations

from dataclasses import dataclass

from automesh.cost.terms import Sum, Terms
from automesh.pipeline.actions import ActionKind
from automesh.pipeline.catalogue import SCHEDULES, make_schedule
from automesh.pipeline.schedule import Schedule, parse_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleText:
    """A schedule in its shortest form: a name, or its actions as text.

    Attributes:
      name: in the catalogue, if there are no `lines`.
      lines: the actions of each rank, as `parse_schedule` reads them.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    num_stages: int
    lines: tuple[str, ...] = ()

    def schedule(self) -> Schedule:
        """Makes the schedule."""
        if self.lines:
            return parse_schedule(self.lines, name=self.name)
        return make_schedule(
            self.name,
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_stages=self.num_stages,
        )


def text_of_schedule(schedule: Schedule) -> ScheduleText:
    """Converts a schedule to its stored form; the inverse of `ScheduleText.schedule`."""
    short = ScheduleText(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        num_microbatches=schedule.num_microbatches,
        num_stages=schedule.num_stages,
    )
    if schedule.name in SCHEDULES and short.schedule() == schedule:
        return short
    return ScheduleText(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        num_microbatches=schedule.num_microbatches,
        num_stages=schedule.num_stages,
        lines=tuple(str(schedule).splitlines()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTerms:
    """One stage, or several that do the same; bytes are of one device and one microbatch.

    Attributes:
      programs: by kind of action; a last stage that recomputes has no `F`.
      finish: the optimizer's update, once for each step.
      params_bytes, sums_bytes, state_bytes: parameters, sums of gradients, the optimizer's state.
      inputs_bytes: the values that it reads from other stages, which it keeps for each microbatch.
      saved_bytes: what its forward pass saves besides.
      outputs_bytes: what it sends on.
      gradients_bytes: what it sends back: gradients of its inputs.
    """

    programs: tuple[tuple[ActionKind, Terms], ...]
    finish: Terms
    params_bytes: Sum
    sums_bytes: Sum
    state_bytes: Sum
    inputs_bytes: Sum
    saved_bytes: Sum
    outputs_bytes: Sum
    gradients_bytes: Sum


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTerms:
    """A step that is a pipeline.

    Attributes:
      axis: the mesh axis of the pipeline.
      kinds: the distinct stages.
      stages: for each stage, its index in `kinds`.
    """

    axis: str
    schedule: ScheduleText
    kinds: tuple[StageTerms, ...]
    stages: tuple[int, ...]
