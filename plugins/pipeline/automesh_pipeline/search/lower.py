"""A pipeline step as the lowered programs of its stages (jax)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from automesh.errors import UsageError, kind_of
from automesh.mesh.axes import Scalar
from automesh.outcomes import PipelineOutcome
from automesh.program.absent.compile import CompileOrder
from automesh.program.execute.prepare import Ready
from automesh.program.execute.value_domains import Domain
from automesh.program.lower.carry_state import Carry, default_carry
from automesh.program.lower.lowered import canonical_lines, fingerprint, loss_dtype, sharded_axes
from automesh.program.lower.program_text import TextLine
from automesh.program.lower.static_args import Split
from automesh.program.script.build import Built
from automesh.program.script.contexts import entered
from automesh_pipeline.runtime.training import TrainState, TrainStep
from automesh_pipeline.search.absent import obtain_pipeline
from automesh_pipeline.search.attached import compile_here, count_here, prepare_pipeline

Options = Sequence[tuple[str, Scalar]]
# (a lowered program, its stage, its action) -> the executable or a stand-in
CompileOne = Callable[[jax.stages.Lowered, int | None, str], Any]
_SCALAR = jax.ShapeDtypeStruct((), "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedProgram:
    """A pipeline step that is traced and cut into stages, with its forward passes lowered.

    Attributes:
      args: the arguments of the step: the state and the batch, abstract or not.
      lowered: the result of `TrainStep.lower`.
    """

    built: Built
    step: TrainStep
    args: tuple[Any, Any]
    lowered: Any

    @property
    def axis(self) -> str:
        """The mesh axis along which the pipeline runs."""
        return self.step.mesh.axis

    @property
    def kwargs(self) -> dict[str, Any]:
        """An empty mapping: a pipeline's step takes no keyword arguments."""
        return {}

    def fingerprint(self, options: Options) -> str:
        """Returns the fingerprint of all that determines the compiled programs.

        The backward passes and the optimizer follow from the forward passes, the schedule and the
        text of the optimizer's update.
        """
        forward = [
            fingerprint(
                one,
                device_ids=[device.id for device in mesh.devices.flat],
                compiler_options=options,
                platform=mesh.devices.flat[0].platform,
            )
            for one, mesh in zip(self.lowered.forward, self.lowered.meshes, strict=True)
        ]
        parts = (forward, str(self.lowered.schedule), self.lowered.update_text)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def split(self) -> Split:
        """A split without static arguments."""
        return Split()

    @property
    def donated(self) -> tuple[bool, ...]:
        """Whether each leaf is donated: the leaves of the state are."""
        state, batch = (len(jax.tree.leaves(arg)) for arg in self.args)
        return (True,) * state + (False,) * batch

    @property
    def carry(self) -> Carry:
        """The default `advance`: the new state replaces the old one."""
        metrics = {"loss": _SCALAR, "grad_norm": _SCALAR}
        return default_carry(self.args, (self.args[0], metrics), self.donated)

    @property
    def compared_outputs(self) -> Any:
        """The loss. Other metrics may differ from those of the step without a pipeline, with which
        this step is compared."""
        return None, {"loss": _SCALAR}

    @property
    def changed_in_place(self) -> int:
        """0: a pipeline changes no argument in place."""
        return 0

    @property
    def stated_splits(self) -> Sequence[Sequence[Sequence[str]] | None]:
        """Nothing: the program of one stage does not show the arguments of the whole step."""
        return ()

    def domains(self) -> tuple[Domain, ...]:
        """Returns nothing: the possible values of leaves are not known."""
        return (Domain(),) * len(jax.tree.leaves(self.args))

    def lines(self) -> tuple[TextLine, ...]:
        """Returns the text that the fingerprint is made from, line by line."""
        forward = [line for one in self.lowered.forward for line in canonical_lines(one)]
        rest = f"{self.lowered.schedule}\n{self.lowered.update_text}".splitlines()
        return (*forward, *(TextLine(text=line, place="") for line in rest))

    @property
    def loss_dtype(self) -> str:
        """The coarsest float type of all stages."""
        found = sorted({loss_dtype(one) for one in self.lowered.forward})
        return min(found, key=lambda name: jnp.finfo(name).nmant)

    def named_axes(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the axes in the stages' shardings, and the one that the pipeline runs along."""
        named = {axis for one in self.lowered.forward for axis in sharded_axes(one, names)}
        is_cut = len(set(self.lowered.meshes)) > 1
        return tuple(name for name in names if name in named or (is_cut and name == self.axis))

    def compile(self, compile_one: CompileOne, *, only_programs: bool = False) -> Any:
        """Compiles the programs of all stages in the user's context; see `TrainStep.lower`.

        Args:
          only_programs: leaves out what is needed to run them.
        """
        with entered(self.built.ambient, self.built.workload.context):
            return self.lowered.compile(compile_one, only_programs=only_programs)

    def compile_here(self, options: Options) -> PipelineOutcome:
        """See `automesh.plugins.pipelines.StagedProgram`."""
        return count_here(self, compile_here(self, options))

    def compile_absent(self, order: CompileOrder) -> PipelineOutcome:
        """See `automesh.plugins.pipelines.StagedProgram`."""
        return obtain_pipeline(self, order)

    def prepare(
        self,
        options: Options,
        *,
        fingerprint: str,
        build_again: Callable[[], Built],
        enter: Callable[[str], None],
    ) -> Ready:
        """See `automesh.plugins.pipelines.StagedProgram`."""
        enter("compile")
        trained = compile_here(self, options)
        enter("materialize")
        return prepare_pipeline(self, trained, fingerprint=fingerprint, build_again=build_again)


def lower_pipeline(
    built: Built, step: TrainStep, *, on: Callable[[Mesh], Mesh] | None = None
) -> StagedProgram:
    """Traces and cuts the loss, and lowers each stage's forward pass on its submesh.

    Args:
      on: returns the mesh to lower a stage for instead of its submesh.

    Raises:
      UsageError: the workload's arguments are not those of a pipeline's step, or the loss cannot
        be cut.
    """
    workload = built.workload
    hint = (
        "write `Workload(step, (step.abstract_state(params, batch), batch))` for the step that "
        "`pipeline.train_step` gives"
    )
    args = cast("tuple[Any, ...]", workload.args)
    if len(args) != 2 or workload.kwargs:
        raise UsageError("a pipeline's step takes a state and a batch", hint=hint)
    state, batch = args
    if not isinstance(state, TrainState):
        raise UsageError(
            f"the first argument of a pipeline's step is its state, got {kind_of(state)}", hint=hint
        )
    if workload.static_argnums != () or workload.donate_argnums != ():
        raise UsageError(
            "`static_argnums` and `donate_argnums` mean nothing for a pipeline's step",
            hint="it gives its state away by itself",
        )
    with entered(built.ambient, workload.context):
        lowered: Any = step.lower(state, batch, on=on)
    return StagedProgram(built=built, step=step, args=(state, batch), lowered=lowered)


def pipeline_of(built: Built) -> TrainStep | None:
    """Returns the pipeline if a workload's step is one; None for an ordinary step."""
    step = built.workload.step
    return step if isinstance(step, TrainStep) else None
