"""The nouns of a training step on its way to the devices: lowered, and compiled (jax)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from automesh.errors import UsageError
from automesh.pipeline.runtime.compiled import CompiledPipeline
from automesh.pipeline.runtime.split.parts import Parts
from automesh.pipeline.runtime.stages.compile import lower_forward
from automesh.pipeline.runtime.stages.executables import CompileOne
from automesh.pipeline.runtime.stages.optimizer import Optimizer, StageUpdate, Updates, plan_updates
from automesh.pipeline.schedule import Schedule


class TrainState(NamedTuple):
    """What a training step carries on.

    Attributes:
      params: a tree of arrays, each on the stage that keeps it.
      optimizer: of each stage the optimizer's state.
    """

    params: Any
    optimizer: tuple[Any, ...]


class LoweredPipeline:
    """A training step whose forward passes are lowered; nothing is compiled. See `TrainStep.lower`.

    Attributes:
      parts: the loss as stages.
      forward: of each stage its forward pass.
    """

    def __init__(
        self,
        parts: Parts,
        optimizer: Optimizer,
        clip_norm: float | None,
        *,
        is_moved: bool,
        done: Callable[[CompiledTraining], None],
    ) -> None:
        self.parts = parts
        self.forward = lower_forward(parts)
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._is_moved = is_moved
        self._done = done

    @property
    def schedule(self) -> Schedule:
        """What is done when."""
        return self.parts.schedule

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Of each stage its submesh."""
        return self.parts.meshes

    @property
    def update_text(self) -> str:
        """What the step does beside its forward passes and its schedule, as text to compare.

        The optimizer's programs with their constants, and what each stage keeps.
        """
        planned = plan_given(self.parts, self._optimizer, self._clip_norm)
        residuals = [one.residuals for one in self.parts.functions]
        scale = self.parts.options.scale
        return "\n".join(
            [*(one.lower_update().as_text() for one in planned), f"{residuals} {scale}"]
        )

    def compile(
        self, compile_one: CompileOne | None = None, *, only_programs: bool = False
    ) -> CompiledTraining:
        """Compiles all programs; the step that was lowered then runs these.

        Args:
          compile_one: called for each program in place of jax, one after the other.
          only_programs: leaves out what is needed to run them, for devices that are not here:
            compiled are the stages' actions and updates.

        Raises:
          UsageError: the step was lowered for stand-ins, and is to be run.
        """
        if self._is_moved and not only_programs:
            raise UsageError("a pipeline that was lowered for other meshes cannot be run")
        pipeline = CompiledPipeline(
            self.parts, forward=self.forward, compile_one=compile_one, only_programs=only_programs
        )
        count = range(len(self.forward))
        planned = plan_updates(
            self.parts,
            [pipeline.finisher.owned_params(stage) for stage in count],
            self._optimizer,
            self._clip_norm,
        )
        updates = Updates(pipeline, planned, compile_one=compile_one, only_programs=only_programs)
        compiled = CompiledTraining(pipeline, updates)
        if not only_programs:
            self._done(compiled)
        return compiled


class CompiledTraining:
    """A training step as programs; `LoweredPipeline.compile` makes it.

    Attributes:
      pipeline: the stages.
    """

    def __init__(self, pipeline: CompiledPipeline, updates: Updates) -> None:
        self.pipeline = pipeline
        self._updates = updates

    def with_schedule(self, schedule: Schedule) -> CompiledTraining:
        """The same step in another order.

        Raises:
          UsageError: see `CompiledPipeline.with_schedule`.
        """
        changed = copy.copy(self)
        changed.pipeline = self.pipeline.with_schedule(schedule)
        return changed

    @property
    def schedule(self) -> Schedule:
        """What is done when."""
        return self.pipeline.schedule

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """Of each stage its submesh."""
        return self.pipeline.meshes

    @property
    def programs(self) -> Mapping[tuple[int, str], Any]:
        """Of each stage its actions that are run, and `update`."""
        updates = {(stage, "update"): one for stage, one in self._updates.programs.items()}
        return {**self.pipeline.programs, **updates}

    @property
    def state(self) -> TrainState:
        """The state with shapes, types and the shardings that it has in fact."""
        likes = [
            self.pipeline.finisher.owned_params(stage)
            for stage in range(len(self.pipeline.parts.functions))
        ]
        return _state(self.pipeline.parts, likes, self._updates.states)

    def init(self, params: Any) -> TrainState:
        """The first state; `params` are copied, each to the stage that keeps it.

        Raises:
          UsageError: see `CompiledPipeline.place`.
        """
        # A step overwrites the parameters that it is given: these must not be the caller's.
        placed = self.pipeline.place(params, copy=True)
        return TrainState(params=placed, optimizer=self._updates.init(jax.tree.leaves(placed)))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """One step; see `TrainStep`."""
        pipeline = self.pipeline
        params = jax.tree.leaves(pipeline.place(state.params))
        ran = pipeline.run(params, batch)
        finished = pipeline.finisher.finish(ran.sums)
        params, optimizer = self._updates.apply(
            params, finished.gradients, state.optimizer, finished.norm
        )
        new = TrainState(params=jax.tree.unflatten(pipeline.structure, params), optimizer=optimizer)
        norm = pipeline.stages.transfers.tell(finished.norm)
        return new, {"loss": pipeline.add_losses(ran), "grad_norm": norm}


def plan_given(
    parts: Parts, optimizer: Optimizer, clip_norm: float | None
) -> tuple[StageUpdate, ...]:
    """The updates of all stages, with the shardings that were given for the parameters."""
    likes = [parts.owned_structs(stage) for stage in range(len(parts.functions))]
    return plan_updates(parts, likes, optimizer, clip_norm)


def abstract_state(parts: Parts, optimizer: Optimizer) -> TrainState:
    """Shapes and shardings of a state; compiles nothing."""
    planned = plan_given(parts, optimizer, None)
    return _state(parts, [one.likes for one in planned], [one.state() for one in planned])


def _state(parts: Parts, likes: Any, states: Any) -> TrainState:
    found = {
        leaf: like
        for leaves, stage in zip(parts.owned, likes, strict=True)
        for leaf, like in zip(leaves, stage, strict=True)
    }
    structure = parts.structures[0]
    params = [found[leaf] for leaf in range(structure.num_leaves)]
    return TrainState(params=jax.tree.unflatten(structure, params), optimizer=tuple(states))
