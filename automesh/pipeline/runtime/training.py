"""`train_step`: a training step that is run as a pipeline, with an optimizer per stage (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError, WrongType, kind_of
from automesh.pipeline.runtime.arguments import Struct
from automesh.pipeline.runtime.compiled import CompiledPipeline, Loss
from automesh.pipeline.runtime.compiling import compile_all
from automesh.pipeline.runtime.mesh import MpmdMesh
from automesh.pipeline.runtime.microbatching import Microbatched, microbatch
from automesh.pipeline.runtime.programs import Residuals
from automesh.pipeline.schedule import Schedule


class Optimizer(Protocol):
    """What makes updates of gradients: any `optax.GradientTransformation`.

    It is called once for each stage with that stage's part of the trees, where None is in the place
    of what other stages keep. So nothing in it may look at all gradients together: clipping by the
    global norm is `train_step`'s.
    """

    @property
    def init(self) -> Any:
        """`params -> state`."""
        ...

    @property
    def update(self) -> Any:
        """`(gradients, state, params) -> (what is added to the parameters, state)`."""
        ...


class TrainState(NamedTuple):
    """What a training step carries on.

    Attributes:
      params: a tree of arrays, each on the stage that keeps it.
      optimizer: of each stage the optimizer's state.
    """

    params: Any
    optimizer: tuple[Any, ...]


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

    def __init__(self, step: Microbatched, optimizer: Optimizer, clip_norm: float | None) -> None:
        self._step = step
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._updates: dict[CompiledPipeline, _Updates] = {}

    def with_schedule(self, schedule: Schedule) -> TrainStep:
        """The same step in another order; what is compiled is used again.

        Raises:
          UsageError: the schedule is not for what was compiled: see `CompiledPipeline`.
        """
        changed = TrainStep(self._step.with_schedule(schedule), self._optimizer, self._clip_norm)
        for key, compiled in self._step.compiled.items():
            if compiled in self._updates:
                changed._updates[changed._step.compiled[key]] = self._updates[compiled]
        return changed

    def init(self, params: Any, batch: Any) -> TrainState:
        """The first state; `params` are copied, each to the stage that keeps it.

        Args:
          batch: of the shapes of every batch to come; may be abstract.

        Raises:
          UsageError: see `microbatch`.
        """
        compiled = self._step.compile(params, batch)
        # A step overwrites the parameters that it is given: these must not be the caller's.
        placed = compiled.place(params, copy=True)
        updates = self._updates_of(compiled)
        return TrainState(params=placed, optimizer=updates.init(jax.tree.leaves(placed)))

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """One step; it overwrites `state`.

        Args:
          batch: a tree of arrays, anywhere.

        Returns:
          The new state, and `loss` and `grad_norm`, the norm before clipping.

        Raises:
          UsageError: the parameters are not where a step has left them, or see `microbatch`.
        """
        compiled = self._step.compile(state.params, batch)
        updates = self._updates_of(compiled)
        params = jax.tree.leaves(compiled.place(state.params))
        ran = compiled.run(params, batch)
        finished = compiled.finisher.finish(ran.sums)
        params, optimizer = updates.apply(
            params, finished.gradients, state.optimizer, finished.norm
        )
        new = TrainState(params=jax.tree.unflatten(compiled.structure, params), optimizer=optimizer)
        return new, {"loss": compiled.add_losses(ran), "grad_norm": finished.norm}

    def compile(self, params: Any, batch: Any) -> CompiledPipeline:
        """The programs of the stages; see `Microbatched.compile`."""
        return self._step.compile(params, batch)

    def _updates_of(self, compiled: CompiledPipeline) -> _Updates:
        if compiled not in self._updates:
            self._updates[compiled] = _Updates(compiled, self._optimizer, self._clip_norm)
        return self._updates[compiled]


class _Updates:
    """The optimizer's programs: of each stage one that makes its state and one that updates."""

    def __init__(
        self, compiled: CompiledPipeline, optimizer: Optimizer, clip_norm: float | None
    ) -> None:
        self._compiled = compiled
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._owned = compiled.finisher.owned
        count = range(len(self._owned))
        self._states = [self._state_struct(stage) for stage in count]
        lowered = [*map(self._lower_init, count), *map(self._lower_update, count)]
        programs = compile_all(lowered)
        self._init, self._update = programs[: len(self._owned)], programs[len(self._owned) :]

    def init(self, params: Sequence[Any]) -> tuple[Any, ...]:
        """The optimizer's first states."""
        return tuple(
            program(tuple(params[leaf] for leaf in leaves))
            for program, leaves in zip(self._init, self._owned, strict=True)
        )

    def apply(
        self, params: Sequence[Any], gradients: Sequence[Any], states: tuple[Any, ...], norm: Any
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """New parameters and states; the old ones are given away."""
        new, kept = list(params), list[Any]()
        everywhere = self._compiled.finisher.everywhere
        for stage, leaves in enumerate(self._owned):
            moved, state = self._update[stage](
                tuple(params[leaf] for leaf in leaves),
                tuple(gradients[leaf] for leaf in leaves),
                states[stage],
                jax.device_put(norm, everywhere[stage]),
            )
            kept.append(state)
            for leaf, one in zip(leaves, moved, strict=True):
                new[leaf] = one
        return new, tuple(kept)

    def _tree(self, stage: int, leaves: Sequence[Any]) -> Any:
        """The whole tree with None for what other stages keep."""
        own = dict(zip(self._owned[stage], leaves, strict=True))
        count = self._compiled.structure.num_leaves
        return jax.tree.unflatten(self._compiled.structure, [own.get(one) for one in range(count)])

    def _state_struct(self, stage: int) -> Any:
        """Shapes and shardings of the state: what is like the parameters is split like them."""
        likes = self._compiled.finisher.owned_params(stage)
        params = self._tree(stage, likes)
        structure = jax.tree.structure(params)
        mesh = self._compiled.meshes[stage]
        with jax.set_mesh(mesh):
            state = jax.eval_shape(self._optimizer.init, params)

        def is_like_params(node: Any) -> bool:
            return jax.tree.structure(node) == structure

        def place(node: Any) -> Any:
            leaves, inner = jax.tree.flatten(node)
            models = likes if is_like_params(node) else (None,) * len(leaves)
            placed = [_struct(leaf, like, mesh) for leaf, like in zip(leaves, models, strict=True)]
            return jax.tree.unflatten(inner, placed)

        return jax.tree.map(place, state, is_leaf=is_like_params)

    def _lower_init(self, stage: int) -> Any:
        likes = self._compiled.finisher.owned_params(stage)

        def init(params: tuple[Any, ...]) -> Any:
            return self._optimizer.init(self._tree(stage, params))

        with jax.set_mesh(self._compiled.meshes[stage]):
            return jax.jit(init, out_shardings=_shardings(self._states[stage])).lower(likes)

    def _lower_update(self, stage: int) -> Any:
        likes, state = self._compiled.finisher.owned_params(stage), self._states[stage]

        def update(
            params: tuple[Any, ...], gradients: tuple[Any, ...], state: Any, norm: Any
        ) -> tuple[tuple[Any, ...], Any]:
            shrink = _shrink(norm, self._clip_norm)
            gradients = tuple(one * shrink.astype(one.dtype) for one in gradients)
            added, state = self._optimizer.update(
                self._tree(stage, gradients), state, self._tree(stage, params)
            )
            moved = tuple(
                param + change.astype(param.dtype)
                for param, change in zip(params, jax.tree.leaves(added), strict=True)
            )
            return moved, state

        scalar = Struct((), jnp.float32, sharding=self._compiled.finisher.everywhere[stage])
        jitted = jax.jit(
            update, donate_argnums=(0, 2), out_shardings=(_shardings(likes), _shardings(state))
        )
        with jax.set_mesh(self._compiled.meshes[stage]):
            return jitted.lower(likes, likes, state, scalar)


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
) -> TrainStep:
    """A training step that is run as a pipeline.

    Args:
      loss: the mean over rows; see `microbatch` for it and for the other arguments.
      optimizer: of optax, or of the same form. It must not clip by the global norm: it sees one
        stage at a time.
      clip_norm: gradients of all stages together are scaled down to this norm if theirs is larger.

    Raises:
      WrongType: an argument of another type.
      UsageError: see `microbatch`, or a norm that is not positive.

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
    if clip_norm is not None and not clip_norm > 0:
        raise UsageError(f"`clip_norm` must be more than 0, got {clip_norm}")
    step = microbatch(
        loss,
        num_microbatches=num_microbatches,
        schedule=schedule,
        mesh=mesh,
        residuals=residuals,
        dim=dim,
    )
    return TrainStep(step, optimizer, clip_norm)


def _shrink(norm: Any, clip_norm: float | None) -> Any:
    """What gradients are multiplied with, so that their norm is at most `clip_norm`."""
    if clip_norm is None:
        return jnp.ones(())
    return jnp.where(norm > clip_norm, clip_norm / norm, 1.0)


def _struct(leaf: Any, like: Struct | None, mesh: Mesh) -> Struct:
    same = like is not None and like.shape == leaf.shape
    everywhere = NamedSharding(mesh, PartitionSpec())
    return Struct(leaf.shape, leaf.dtype, sharding=like.sharding if same and like else everywhere)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
