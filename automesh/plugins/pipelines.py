"""The interface of the plug-in that runs pipelines, in the group `automesh.pipelines`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from automesh.plugins.entry_points import installed, load
from automesh.plugins.offered import PIPELINES

if TYPE_CHECKING:
    from automesh.hardware.absent import AbsentDevices
    from automesh.mesh.axes import MeshAxis, Scalar
    from automesh.outcomes import PipelineOutcome
    from automesh.program.absent.compile import CompileOrder
    from automesh.program.execute.prepare import Ready
    from automesh.program.execute.value_domains import Domain
    from automesh.program.lower.carry_state import Carry
    from automesh.program.lower.program_text import TextLine
    from automesh.program.lower.static_args import Split
    from automesh.program.nouns import Propagation
    from automesh.program.script.build import Built
    from automesh.sharding.programs import Sizes

RUNTIME = "runtime"
"""The name of the entry point."""


class StagedProgram(Protocol):
    """A step that is a pipeline, lowered as several programs: those of its stages.

    What it has in common with `automesh.program.lower.lowering.SingleProgram` is described there.
    """

    @property
    def built(self) -> Built: ...
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def split(self) -> Split: ...
    @property
    def donated(self) -> tuple[bool, ...]: ...
    @property
    def carry(self) -> Carry: ...
    @property
    def compared_outputs(self) -> Any: ...
    @property
    def changed_in_place(self) -> int: ...
    @property
    def stated_splits(self) -> Sequence[Sequence[Sequence[str]] | None]: ...
    @property
    def loss_dtype(self) -> str: ...
    def fingerprint(self, options: Sequence[tuple[str, Scalar]]) -> str: ...
    def domains(self) -> tuple[Domain, ...]: ...
    def lines(self) -> tuple[TextLine, ...]: ...
    def named_axes(self, names: Sequence[str]) -> tuple[str, ...]: ...

    def compile_here(self, options: Sequence[tuple[str, Scalar]]) -> PipelineOutcome:
        """Compiles all programs for the devices that are here.

        Raises:
          Refused: a program does not fit, an option is not taken, or a program cannot be read.
        """
        ...

    def compile_absent(self, order: CompileOrder) -> PipelineOutcome:
        """Compiles the programs that run for each microbatch, and the updates, for absent devices.

        Raises:
          Refused: as `compile_here`; or a store cannot be written.
        """
        ...

    def prepare(
        self,
        options: Sequence[tuple[str, Scalar]],
        *,
        fingerprint: str,
        build_again: Callable[[], Built],
        enter: Callable[[str], None],
    ) -> Ready:
        """Compiles the step, and decides where the values of its arguments come from.

        Args:
          enter: is called with the name of the next stage.

        Raises:
          Refused: as `compile_here`.
          UsageError: what `init` gives does not fit the arguments.
        """
        ...


class Stages(Protocol):
    """A pipeline at one choice of knobs and one number of ranks; a worker keeps it between jobs."""

    def propagate(
        self,
        *,
        sizes: Sizes,
        probes: Sequence[Sizes],
        exact: bool,
        enter: Callable[[str], None],
    ) -> Propagation:
        """Returns the terms for the axes in `sizes`, that of the pipeline among them.

        Raises:
          Refused, Exception: see `automesh.sharding.propagate.propagate`.
        """
        ...


class Pipelines(Protocol):
    """The interface of what runs steps that are pipelines; all of it imports jax."""

    def is_pipeline(self, step: object) -> bool:
        """Whether a workload's step is one of its pipelines."""
        ...

    def lower(self, built: Built) -> StagedProgram:
        """Traces and cuts the loss, and lowers each stage's forward pass on its submesh.

        Raises:
          UsageError: the workload's arguments are not those of a pipeline's step, or the loss
            cannot be cut.
        """
        ...

    def lower_for_absent(
        self, built: Built, one: AbsentDevices
    ) -> tuple[StagedProgram, AbsentDevices]:
        """Lowers it for devices that are not here.

        Args:
          one: all devices of the pipeline.

        Returns:
          The pipeline; and what it was lowered for: of several slices as many as a rank spans.

        Raises:
          UsageError: as `lower`.
          Refused: its submeshes cannot be compiled for.
        """
        ...

    def stages(
        self,
        *,
        build: Callable[[Sequence[MeshAxis]], Built],
        axis: str,
        ranks: int,
        axis_names: tuple[str, ...],
        platform: str,
    ) -> Stages:
        """Returns the stages of a pipeline, whose shardings are to be propagated.

        Args:
          build: the step on a mesh of these axes.
          axis: that the mesh is cut along.
          ranks: into how many parts.
          axis_names: of the whole mesh, in order.
          platform: see `automesh.sharding.programs.Programs`.
        """
        ...

    def public(self, name: str) -> Any:
        """Returns one of the names of `automesh.pipeline` that belong to what runs pipelines."""
        ...


def find_pipelines(what: str) -> Pipelines:
    """Returns the installed plug-in that runs pipelines (imports jax).

    Args:
      what: the function that needs it, for the error: "`automesh.pipeline.train_step`".

    Raises:
      UsageError: there is none, or it cannot be loaded.
    """
    found: Pipelines = load(PIPELINES, RUNTIME, what=what)
    return found


def pipelines_of(step: object) -> Pipelines | None:
    """Returns the plug-in whose pipeline a workload's step is; None for an ordinary step.

    The code that makes such a step has imported the plug-in, so no plug-in is loaded for other
    steps.

    Raises:
      UsageError: the plug-in cannot be loaded.
    """
    package = type(step).__module__.partition(".")[0]
    for name, points in installed(PIPELINES).items():
        if any(point.module.partition(".")[0] == package for point in points):
            found: Pipelines = load(PIPELINES, name)
            if found.is_pipeline(step):
                return found
    return None
