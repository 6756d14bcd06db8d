"""The noun `PipelineOptions`: how a loss is run as a pipeline, checked and filled in (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from jax.sharding import Mesh

from automesh.errors import UsageError, WrongType, check_type, kind_of
from automesh.mesh.layout.context import need_mesh
from automesh.pipeline.catalogue import SCHEDULES, make_schedule
from automesh.pipeline.schedule import Schedule
from automesh_pipeline.runtime.mesh import MpmdMesh
from automesh_pipeline.runtime.split.marks import TaskRules, rules_in_force
from automesh_pipeline.runtime.split.programs import Residuals

Reduce = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options with which a loss is run as a pipeline; see `microbatch`.

    Attributes:
      rules: the rules of the tasks that were registered when the pipeline was made.
    """

    mesh: MpmdMesh
    schedule: Schedule | str
    num_microbatches: int
    reduce: Reduce
    residuals: Residuals | tuple[Residuals, ...]
    dim: int
    rules: TaskRules

    @property
    def scale(self) -> float:
        """The factor for the sums over the microbatches."""
        return 1 / self.num_microbatches if self.reduce == "mean" else 1.0

    def schedule_for(self, num_stages: int) -> Schedule:
        """Returns the schedule for a loss of so many stages.

        Raises:
          UsageError: the schedule is for other numbers of stages, ranks or microbatches.
        """
        if isinstance(self.schedule, str):
            try:
                return make_schedule(
                    self.schedule,
                    num_ranks=self.mesh.num_ranks,
                    num_microbatches=self.num_microbatches,
                    num_stages=num_stages,
                )
            except UsageError as error:
                raise UsageError(
                    f"the loss has {num_stages} stage{'s' * (num_stages > 1)}: {error.message}",
                    hint=error.hint,
                ) from error
        return self.check_schedule(self.schedule, num_stages)

    def check_schedule(self, schedule: Schedule, num_stages: int) -> Schedule:
        """Checks that a schedule is for this loss and mesh.

        Raises:
          UsageError: it is for other ones.
        """
        wanted = (
            ("stages", schedule.num_stages, num_stages, "the loss has"),
            ("ranks", schedule.num_ranks, self.mesh.num_ranks, "the mesh has"),
            (
                "microbatches",
                schedule.num_microbatches,
                self.num_microbatches,
                "the batch is cut into",
            ),
        )
        for what, planned, there, who in wanted:
            if planned != there:
                raise UsageError(
                    f"the schedule `{schedule.name}` is for {planned} {what}, and {who} {there}"
                )
        return schedule

    def residuals_of(self, num_stages: int) -> tuple[Residuals, ...]:
        """Returns what each stage keeps for its backward pass.

        Raises:
          UsageError: `residuals` has an entry for another number of stages.
        """
        if isinstance(self.residuals, str):
            return (self.residuals,) * num_stages
        if len(self.residuals) != num_stages:
            raise UsageError(
                f"`residuals` has {len(self.residuals)} entries, and the loss {num_stages} stages",
                hint="give one for all stages, or one for each",
            )
        return self.residuals


def check_options(
    *,
    mesh: MpmdMesh | Mesh | None,
    schedule: Schedule | str,
    num_microbatches: int,
    reduce: Reduce,
    residuals: Residuals | Sequence[Residuals],
    dim: int,
    what: str,
) -> PipelineOptions:
    """Checks and completes the options of a pipeline.

    Args:
      mesh: a mesh with an axis `pp`, which is cut along it; None takes the mesh in force.
      what: the function that was called, for errors.

    Raises:
      WrongType, UsageError: see `microbatch`.
    """
    if mesh is None:
        mesh = need_mesh(what=what)
    if not isinstance(cast("object", mesh), MpmdMesh | Mesh):
        raise WrongType(
            f"`mesh` must be an MpmdMesh or a jax.sharding.Mesh, got {kind_of(mesh)}",
            hint='write for example MpmdMesh(mesh, axis="pp")',
        )
    for name, value, least in (("num_microbatches", num_microbatches, 1), ("dim", dim, 0)):
        check_type(value, int, f"`{name}` must be an int")
        if value < least:
            raise UsageError(f"`{name}` is at least {least}, got {value}")
    if not isinstance(cast("object", schedule), Schedule | str):
        raise WrongType(
            f"`schedule` must be a Schedule or the name of one, got {kind_of(schedule)}",
            hint=f"take one of {', '.join(SCHEDULES)}, or write your own with `parse_schedule`",
        )
    _check_choice("reduce", reduce, get_args(Reduce))
    chosen = (residuals,) if isinstance(residuals, str) else tuple(residuals)
    for one in chosen:
        _check_choice("residuals", one, get_args(Residuals))
    return PipelineOptions(
        mesh=mesh if isinstance(mesh, MpmdMesh) else MpmdMesh(mesh),
        schedule=schedule,
        num_microbatches=num_microbatches,
        reduce=reduce,
        residuals=residuals if isinstance(residuals, str) else tuple(residuals),
        dim=dim,
        rules=rules_in_force(),
    )


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"`{name}` is one of {', '.join(allowed)}, got {value!r}")
