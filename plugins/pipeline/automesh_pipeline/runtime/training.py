"""`train_step`: a training step that is run as a pipeline, with an optimizer per stage (jax)."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
from jax.sharding import Mesh

from automesh.errors import AutomeshError, UsageError, WrongType, kind_of
from automesh.pipeline.schedule import Schedule
from automesh_pipeline.runtime.compiled import CompiledPipeline
from automesh_pipeline.runtime.mesh import MpmdMesh
from automesh_pipeline.runtime.microbatching import Microbatched, microbatch
from automesh_pipeline.runtime.split.arguments import Structs
from automesh_pipeline.runtime.split.parts import Loss, Parts, shapes_key
from automesh_pipeline.runtime.split.programs import Residuals
from automesh_pipeline.runtime.stages.compile import CompileOne, ProgramCompiler, lower_forward
from automesh_pipeline.runtime.stages.stage import Optimizer, StageUpdate
from automesh_pipeline.runtime.stages.updates import Updates, plan_updates

__all__ = ["Optimizer", "TrainState", "TrainStep", "train_step"]

T = TypeVar("T")


class TrainState(NamedTuple):
    """The state of a training step, which each step replaces.

    Attributes:
      params: a tree of arrays, each on the stage that keeps it.
      optimizer: the optimizer's state of each stage.
    """

    params: Any
    optimizer: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredPipeline:
    """A training step whose forward passes are lowered; nothing is compiled. See `TrainStep.lower`.

    Attributes:
      parts: the loss as stages.
      forward: the lowered forward pass of each stage.
      is_moved: whether it was lowered for other meshes than its own.
      done: called with the compiled step, if it can be run.
    """

    parts: Parts
    forward: tuple[jax.stages.Lowered, ...]
    optimizer: Optimizer
    clip_norm: float | None
    is_moved: bool
    done: Callable[[CompiledTraining], None]

    @property
    def schedule(self) -> Schedule:
        """The order of the work."""
        return self.parts.schedule

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The submesh of each stage."""
        return self.parts.meshes

    @property
    def update_text(self) -> str:
        """The step apart from its forward passes and its schedule, as text to compare.

        It has the optimizer's programs with their constants, and the parameters that each stage
        keeps.
        """
        planned = plan_given(self.parts, self.optimizer, self.clip_norm)
        residuals = [function.residuals for function in self.parts.functions]
        scale = self.parts.options.scale
        return "\n".join(
            [*(one.lower_update().as_text() for one in planned), f"{residuals} {scale}"]
        )

    def compile(
        self, compile_one: CompileOne | None = None, *, only_programs: bool = False
    ) -> CompiledTraining:
        """Compiles all programs; the step that was lowered then runs these.

        Args:
          compile_one: compiles a program instead of jax; called for one after the other.
          only_programs: compiles only the stages' actions and updates, and no helper programs to
            run them; for absent devices.

        Raises:
          UsageError: the step was lowered for other devices, but `only_programs` is False.
        """
        if self.is_moved and not only_programs:
            raise UsageError("a pipeline that was lowered for other meshes cannot be run")
        compiler = ProgramCompiler(compile_one=compile_one, only_programs=only_programs)
        pipeline = CompiledPipeline(self.parts, forward=self.forward, compiler=compiler)
        likes = [shape.owned(shape.params) for shape in pipeline.stages.shapes]
        planned = plan_updates(self.parts, likes, self.optimizer, self.clip_norm)
        updates = Updates(pipeline.stages, planned)
        compiled = CompiledTraining(pipeline=pipeline, updates=updates)
        if not only_programs:
            self.done(compiled)
        return compiled


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledTraining:
    """A training step as programs; `LoweredPipeline.compile` makes it.

    Attributes:
      pipeline: the stages.
      updates: the updates of their parameters.
    """

    pipeline: CompiledPipeline
    updates: Updates

    def with_schedule(self, schedule: Schedule) -> CompiledTraining:
        """Returns the same step with another schedule.

        Raises:
          UsageError: see `CompiledPipeline.with_schedule`.
        """
        return replace(self, pipeline=self.pipeline.with_schedule(schedule))

    @property
    def schedule(self) -> Schedule:
        """The order of the work."""
        return self.pipeline.schedule

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The submesh of each stage."""
        return self.pipeline.meshes

    @property
    def programs(self) -> Mapping[tuple[int, str], Any]:
        """The compiled programs of each stage: those of its actions, and `update`."""
        updates = {(stage, "update"): one for stage, one in self.updates.programs.items()}
        return {**self.pipeline.programs, **updates}

    @property
    def state(self) -> TrainState:
        """The state's shapes, types and actual shardings."""
        likes = [one.likes for one in self.updates.planned]
        return _state(self.pipeline.parts, likes, self.updates.states)

    def init(self, params: Any) -> TrainState:
        """Makes the first state; copies each parameter to the stage that keeps it.

        Raises:
          UsageError: see `CompiledPipeline.place`.
        """
        # A step overwrites the parameters that it gets, so these must not be the caller's.
        placed = self.pipeline.place(params, copy=True)
        return TrainState(params=placed, optimizer=self.updates.init(jax.tree.leaves(placed)))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step; see `TrainStep`."""
        pipeline = self.pipeline
        params = jax.tree.leaves(pipeline.place(state.params))
        ran = pipeline.run(params, batch)
        finished = pipeline.finisher.finish(ran.sums)
        params, optimizer = self.updates.apply(
            params, finished.gradients, state.optimizer, finished.norm
        )
        new = TrainState(params=jax.tree.unflatten(pipeline.structure, params), optimizer=optimizer)
        norm = pipeline.stages.transfers.tell(finished.norm)
        return new, {"loss": pipeline.add_losses(ran), "grad_norm": norm}


def plan_given(
    parts: Parts, optimizer: Optimizer, clip_norm: float | None
) -> tuple[StageUpdate, ...]:
    """Plans the updates of all stages, with the given shardings of the parameters."""
    likes = [parts.owned_structs(stage) for stage in range(len(parts.functions))]
    return plan_updates(parts, likes, optimizer, clip_norm)


def abstract_state(parts: Parts, optimizer: Optimizer) -> TrainState:
    """Returns shapes and shardings of a state; compiles nothing."""
    planned = plan_given(parts, optimizer, None)
    return _state(parts, [one.likes for one in planned], [one.state() for one in planned])


def _state(parts: Parts, likes: Sequence[Structs], states: Sequence[Any]) -> TrainState:
    params = jax.tree.unflatten(parts.structures[0], parts.in_order(likes))
    return TrainState(params=params, optimizer=tuple(states))


def run_in_time(call: Callable[[], T], *, timeout_s: float) -> T:
    """Calls a function, waits for its arrays, and returns them.

    After `timeout_s` the process ends with a sentence and exit code 1: nothing else can end a
    program that hangs on a device. With several processes, jax's coordination service then ends the
    others.

    Raises:
      AutomeshError: a program of the call failed on its device.
    """
    timer = threading.Timer(timeout_s, _end, [timeout_s])
    timer.daemon = True
    timer.start()
    try:
        return jax.block_until_ready(call())
    except jax.errors.JaxRuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise AutomeshError(
            f"a stage of the pipeline failed on its devices: {lines[-1].strip()}"
        ) from error
    finally:
        timer.cancel()


def _end(timeout_s: float) -> NoReturn:
    sys.stderr.write(
        f"error: a step of the pipeline did not end in {timeout_s:g} s: a stage hangs, or another "
        "process is gone\n"
    )
    sys.stderr.flush()
    # `sys.exit` would wait for the devices.
    os._exit(1)


class TrainStep:
    """A training step; `train_step` makes it.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from automesh import create_mesh, pipeline
      >>> layer = lambda w, x: jnp.tanh(x @ w)
      >>> loss = pipeline.chain([layer, layer], lambda y, batch: jnp.mean((y - 1) ** 2))
      >>> step = pipeline.train_step(
      ...     loss, optimizer=optax.adam(0.1), mesh=create_mesh((2, 4), ("pp", "dp")),
      ...     num_microbatches=2, clip_norm=1.0,
      ... )
      >>> batch = jnp.ones((8, 4))
      >>> state = step.init((jnp.eye(4), jnp.eye(4)), batch)
      >>> for _ in range(3):
      ...     state, metrics = step(state, batch)
      >>> metrics["loss"].item() < 0.1
      True
    """

    def __init__(
        self,
        step: Microbatched,
        optimizer: Optimizer,
        *,
        clip_norm: float | None,
        timeout_s: float | None,
    ) -> None:
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self._timeout_s = timeout_s
        self._step = step
        # Keyed by the shapes of parameters and batch.
        self._compiled: dict[Any, CompiledTraining] = {}

    def with_schedule(self, schedule: Schedule) -> TrainStep:
        """Returns the same step with another schedule; compiled programs are used again.

        Raises:
          UsageError: the schedule does not fit the compiled programs; see `CompiledPipeline`.
        """
        changed = TrainStep(
            self._step.with_schedule(schedule),
            self.optimizer,
            clip_norm=self.clip_norm,
            timeout_s=self._timeout_s,
        )
        changed._compiled = {
            key: one.with_schedule(schedule) for key, one in self._compiled.items()
        }
        return changed

    @property
    def mesh(self) -> MpmdMesh:
        """The mesh and its submeshes."""
        return self._step.options.mesh

    def parts(self, params: Any, batch: Any) -> Parts:
        """Cuts the loss into stages; compiles nothing.

        Args:
          params, batch: arrays, abstract or not. The first parameters of these shapes determine the
            shardings.

        Raises:
          UsageError: see `microbatch`.
        """
        return self._step.parts(params, batch)

    def abstract_state(self, params: Any, batch: Any) -> TrainState:
        """Returns shapes and shardings of the state, on the submeshes of the stages; compiles
        nothing.

        A parameter without a given sharding is described as a copy on every device of its stage;
        the compiled step may split it.

        Args:
          params, batch: see `parts`.

        Raises:
          UsageError: see `microbatch`.

        Example:
          >>> import jax, jax.numpy as jnp, optax
          >>> from automesh import create_mesh, pipeline
          >>> loss = pipeline.chain([lambda w, x: x @ w] * 2, lambda y, batch: jnp.mean(y**2))
          >>> mesh = create_mesh((2, 4), ("pp", "dp"))
          >>> step = pipeline.train_step(
          ...     loss, optimizer=optax.adam(0.1), num_microbatches=2, mesh=mesh
          ... )
          >>> one = jax.ShapeDtypeStruct((4, 4), jnp.float32)
          >>> state = step.abstract_state((one, one), jax.ShapeDtypeStruct((8, 4), jnp.float32))
          >>> [sorted(device.id for device in one.sharding.device_set) for one in state.params]
          [[0, 1, 2, 3], [4, 5, 6, 7]]
        """
        return abstract_state(self.parts(params, batch), self.optimizer)

    def lower(
        self, state: TrainState, batch: Any, *, on: Callable[[Mesh], Mesh] | None = None
    ) -> LoweredPipeline:
        """Traces the step, cuts it into stages, and lowers their forward passes; compiles nothing.

        Args:
          state, batch: arrays, abstract or not; see `parts`.
          on: takes the submesh of a stage, and returns a mesh of the same shape to lower and
            compile for. The programs are then compiled to be looked at, not to be run.

        Raises:
          UsageError: see `microbatch`.
        """
        parts = self.parts(state.params, batch)
        if on is not None:
            parts = replace(parts, meshes=tuple(map(on, parts.meshes)))
        key = shapes_key(state.params, batch)

        def keep(compiled: CompiledTraining) -> None:
            self._compiled[key] = compiled

        return LoweredPipeline(
            parts=parts,
            forward=lower_forward(parts),
            optimizer=self.optimizer,
            clip_norm=self.clip_norm,
            is_moved=on is not None,
            done=keep,
        )

    def init(self, params: Any, batch: Any) -> TrainState:
        """Makes the first state; copies each parameter to the stage that keeps it.

        Args:
          batch: a batch with the shapes of all later ones; may be abstract.

        Raises:
          UsageError: see `microbatch`.
        """
        return self._compile(params, batch).init(params)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Runs one step; overwrites `state`.

        Args:
          batch: a tree of arrays, on any devices.

        Returns:
          The new state, and `loss` and `grad_norm`, the norm before clipping.

        Raises:
          UsageError: the parameters are not on the devices of their stages; or see `microbatch`.
          AutomeshError: with a time limit: a stage failed.
        """
        compiled = self._compile(state.params, batch)
        if self._timeout_s is None:
            return compiled(state, batch)
        return run_in_time(lambda: compiled(state, batch), timeout_s=self._timeout_s)

    def compile(self, params: Any, batch: Any) -> CompiledPipeline:
        """Compiles the programs of the stages; see `Microbatched.compile`."""
        return self._compile(params, batch).pipeline

    def _compile(self, params: Any, batch: Any) -> CompiledTraining:
        key = shapes_key(params, batch)
        if key not in self._compiled:
            self.lower(TrainState(params=params, optimizer=()), batch).compile()
        return self._compiled[key]


def train_step(
    loss: Loss,
    *,
    optimizer: Optimizer,
    num_microbatches: int,
    schedule: Schedule | str = "1f1b",
    mesh: MpmdMesh | Mesh | None = None,
    clip_norm: float | None = None,
    residuals: Residuals | Sequence[Residuals] = "recompute",
    dim: int = 0,
    timeout_s: float | None = None,
) -> TrainStep:
    """Makes a training step that is run as a pipeline.

    Args:
      loss: a loss that is a mean over rows; see `microbatch` for it and for the other arguments.
      optimizer: an optimizer of optax, or one of the same form. It must not clip by the global
        norm, because it is called for one stage at a time.
      clip_norm: the largest norm of the gradients of all stages together; larger gradients are
        scaled down to it.
      timeout_s: seconds that a compiled step may take. Each call then waits for its step, and if a
        stage hangs, the process ends with a sentence and exit code 1. None: calls do not wait.

    Raises:
      WrongType: an argument has another type.
      UsageError: see `microbatch`; or a norm or a time is not positive.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from automesh import create_mesh, pipeline
      >>> loss = pipeline.chain([lambda w, x: x @ w] * 2, lambda y, batch: jnp.mean(y**2))
      >>> mesh = create_mesh((2, 4), ("pp", "dp"))
      >>> step = pipeline.train_step(loss, optimizer=optax.sgd(0.1), num_microbatches=2, mesh=mesh)
      >>> state = step.init((jnp.eye(4), jnp.eye(4)), jnp.ones((8, 4)))
      >>> state, metrics = step(state, jnp.ones((8, 4)))
      >>> metrics["loss"].item(), round(metrics["grad_norm"].item(), 4)
      (1.0, 2.8284)
    """
    for method in ("init", "update"):
        if not callable(getattr(optimizer, method, None)):
            raise WrongType(
                f"`optimizer` must have `init` and `update`, as optax's have, got "
                f"{kind_of(optimizer)}"
            )
    for name, value in (("clip_norm", clip_norm), ("timeout_s", timeout_s)):
        if value is not None and not value > 0:
            raise UsageError(f"`{name}` must be more than 0, got {value}")
    step = microbatch(
        loss,
        num_microbatches=num_microbatches,
        schedule=schedule,
        mesh=mesh,
        residuals=residuals,
        dim=dim,
    )
    return TrainStep(step, optimizer, clip_norm=clip_norm, timeout_s=timeout_s)
