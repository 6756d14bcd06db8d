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
    """What a training step carries on.

    Attributes:
      params: a tree of arrays, each on the stage that keeps it.
      optimizer: of each stage the optimizer's state.
    """

    params: Any
    optimizer: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredPipeline:
    """A training step whose forward passes are lowered; nothing is compiled. See `TrainStep.lower`.

    Attributes:
      parts: the loss as stages.
      forward: of each stage its forward pass.
      is_moved: whether it was lowered for other meshes than its own.
      done: is given what is compiled, if it can be run.
    """

    parts: Parts
    forward: tuple[jax.stages.Lowered, ...]
    optimizer: Optimizer
    clip_norm: float | None
    is_moved: bool
    done: Callable[[CompiledTraining], None]

    @property
    def schedule(self) -> Schedule:
        """What is done when."""
        return self.parts.schedule

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The submesh of each stage."""
        return self.parts.meshes

    @property
    def update_text(self) -> str:
        """What the step does beside its forward passes and its schedule, as text to compare.

        The optimizer's programs with their constants, and what each stage keeps.
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
          compile_one: called for each program in place of jax, one after the other.
          only_programs: leaves out what is needed to run them, for devices that are not here:
            compiled are the stages' actions and updates.

        Raises:
          UsageError: the step was lowered for stand-ins, and is to be run.
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
      updates: what their parameters are updated with.
    """

    pipeline: CompiledPipeline
    updates: Updates

    def with_schedule(self, schedule: Schedule) -> CompiledTraining:
        """The same step in another order.

        Raises:
          UsageError: see `CompiledPipeline.with_schedule`.
        """
        return replace(self, pipeline=self.pipeline.with_schedule(schedule))

    @property
    def schedule(self) -> Schedule:
        """What is done when."""
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
        """The state with shapes, types and the shardings that it has in fact."""
        likes = [one.likes for one in self.updates.planned]
        return _state(self.pipeline.parts, likes, self.updates.states)

    def init(self, params: Any) -> TrainState:
        """The first state; `params` are copied, each to the stage that keeps it.

        Raises:
          UsageError: see `CompiledPipeline.place`.
        """
        # A step overwrites the parameters that it is given: these must not be the caller's.
        placed = self.pipeline.place(params, copy=True)
        return TrainState(params=placed, optimizer=self.updates.init(jax.tree.leaves(placed)))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """One step; see `TrainStep`."""
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
    """The updates of all stages, with the shardings that were given for the parameters."""
    likes = [parts.owned_structs(stage) for stage in range(len(parts.functions))]
    return plan_updates(parts, likes, optimizer, clip_norm)


def abstract_state(parts: Parts, optimizer: Optimizer) -> TrainState:
    """Shapes and shardings of a state; compiles nothing."""
    planned = plan_given(parts, optimizer, None)
    return _state(parts, [one.likes for one in planned], [one.state() for one in planned])


def _state(parts: Parts, likes: Sequence[Structs], states: Sequence[Any]) -> TrainState:
    params = jax.tree.unflatten(parts.structures[0], parts.in_order(likes))
    return TrainState(params=params, optimizer=tuple(states))


def run_in_time(call: Callable[[], T], *, timeout_s: float) -> T:
    """What a call returns, once it is there.

    If it is not in time, the process ends with a sentence and exit code 1: nothing else ends what
    hangs on a device. With several processes, jax's coordination service then ends the others.

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
    # An orderly exit would wait for the devices.
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
        # By shapes of parameters and batch.
        self._compiled: dict[Any, CompiledTraining] = {}

    def with_schedule(self, schedule: Schedule) -> TrainStep:
        """The same step in another order; what is compiled is used again.

        Raises:
          UsageError: the schedule is not for what was compiled: see `CompiledPipeline`.
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
        """The mesh as it is cut."""
        return self._step.options.mesh

    def parts(self, params: Any, batch: Any) -> Parts:
        """The loss cut into stages; compiles nothing.

        Args:
          params, batch: arrays, abstract or not. The shardings that parameters have the first time
            that there are some of these shapes are those that they get.

        Raises:
          UsageError: see `microbatch`.
        """
        return self._step.parts(params, batch)

    def abstract_state(self, params: Any, batch: Any) -> TrainState:
        """Shapes and shardings of the state, on the submeshes of the stages; compiles nothing.

        What is given without a sharding is said to be on every device of its stage; compiled, it
        may be split.

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
        """The first state; `params` are copied, each to the stage that keeps it.

        Args:
          batch: of the shapes of every batch to come; may be abstract.

        Raises:
          UsageError: see `microbatch`.
        """
        return self._compile(params, batch).init(params)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """One step; it overwrites `state`.

        Args:
          batch: a tree of arrays, anywhere.

        Returns:
          The new state, and `loss` and `grad_norm`, the norm before clipping.

        Raises:
          UsageError: the parameters are not where a step has left them, or see `microbatch`.
          AutomeshError: with a time limit: a stage failed.
        """
        compiled = self._compile(state.params, batch)
        if self._timeout_s is None:
            return compiled(state, batch)
        return run_in_time(lambda: compiled(state, batch), timeout_s=self._timeout_s)

    def compile(self, params: Any, batch: Any) -> CompiledPipeline:
        """The programs of the stages; see `Microbatched.compile`."""
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
    """A training step that is run as a pipeline.

    Args:
      loss: the mean over rows; see `microbatch` for it and for the other arguments.
      optimizer: of optax, or of the same form. It must not clip by the global norm: it sees one
        stage at a time.
      clip_norm: gradients of all stages together are scaled down to this norm if theirs is larger.
      timeout_s: seconds that a step may take once it is compiled. It is then waited for, and if a
        stage hangs the process ends with a sentence and exit code 1; None waits for nothing.

    Raises:
      WrongType: an argument of another type.
      UsageError: see `microbatch`, or a norm or a time that is not positive.

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
