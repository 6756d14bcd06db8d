"""`train_step`: a training step that is run as a pipeline, with an optimizer per stage (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from automesh.errors import UsageError, WrongType, kind_of
from automesh.pipeline.runtime.compiled import CompiledPipeline
from automesh.pipeline.runtime.mesh import MpmdMesh
from automesh.pipeline.runtime.microbatching import Microbatched, microbatch
from automesh.pipeline.runtime.split.parts import Loss, Parts, shapes_key
from automesh.pipeline.runtime.split.programs import Residuals
from automesh.pipeline.runtime.stages.optimizer import Optimizer
from automesh.pipeline.runtime.trained import (
    CompiledTraining,
    LoweredPipeline,
    TrainState,
    abstract_state,
)
from automesh.pipeline.runtime.watchdog import run_in_time
from automesh.pipeline.schedule import Schedule

__all__ = ["Optimizer", "TrainState", "TrainStep", "train_step"]


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
        """The step traced, cut, and its forward passes lowered; compiles nothing.

        Args:
          state, batch: arrays, abstract or not; see `parts`.
          on: of each stage's submesh the mesh of the same shape to lower and compile for in its
            place. It is then compiled to look at, not to be run.

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
            parts, self.optimizer, self.clip_norm, is_moved=on is not None, done=keep
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
