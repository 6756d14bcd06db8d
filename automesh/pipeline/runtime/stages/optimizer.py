"""The optimizer's programs: of each stage one that makes its state and one that updates (jax)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.pipeline.runtime.compiled import CompiledPipeline
from automesh.pipeline.runtime.split.arguments import Struct, Structs
from automesh.pipeline.runtime.split.parts import Parts
from automesh.pipeline.runtime.stages.executables import CompileOne, Job, compile_jobs


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageUpdate:
    """How one stage's parameters are updated.

    Attributes:
      leaves: which parameters of all it keeps.
      structure: of the tree of all parameters.
      likes: the parameters that it keeps, with their shardings.
      clip_norm: None does not clip.
    """

    optimizer: Optimizer
    clip_norm: float | None
    mesh: Mesh
    structure: Any
    leaves: tuple[int, ...]
    likes: Structs

    def state(self) -> Any:
        """Shapes and shardings of the state: what is like the parameters is split like them."""
        params = self._tree(self.likes)
        structure = jax.tree.structure(params)
        with jax.set_mesh(self.mesh):
            state = jax.eval_shape(self.optimizer.init, params)

        def is_like_params(node: Any) -> bool:
            return jax.tree.structure(node) == structure

        def place(node: Any) -> Any:
            leaves, inner = jax.tree.flatten(node)
            models = self.likes if is_like_params(node) else (None,) * len(leaves)
            placed = [self._struct(leaf, like) for leaf, like in zip(leaves, models, strict=True)]
            return jax.tree.unflatten(inner, placed)

        return jax.tree.map(place, state, is_leaf=is_like_params)

    def lower_init(self) -> jax.stages.Lowered:
        """`params -> state`."""

        def init(params: tuple[Any, ...]) -> Any:
            return self.optimizer.init(self._tree(params))

        with jax.set_mesh(self.mesh):
            return jax.jit(init, out_shardings=_shardings(self.state())).lower(self.likes)

    def lower_update(self) -> jax.stages.Lowered:
        """`(params, gradients, state, norm) -> (params, state)`; takes over params and state."""
        state = self.state()
        scalar = Struct((), jnp.float32, sharding=NamedSharding(self.mesh, PartitionSpec()))
        jitted = jax.jit(
            self._update,
            donate_argnums=(0, 2),
            out_shardings=(_shardings(self.likes), _shardings(state)),
        )
        with jax.set_mesh(self.mesh):
            return jitted.lower(self.likes, self.likes, state, scalar)

    def _update(
        self, params: tuple[Any, ...], gradients: tuple[Any, ...], state: Any, norm: Any
    ) -> tuple[tuple[Any, ...], Any]:
        shrink = _shrink(norm, self.clip_norm)
        gradients = tuple(one * shrink.astype(one.dtype) for one in gradients)
        added, state = self.optimizer.update(self._tree(gradients), state, self._tree(params))
        moved = tuple(
            param + change.astype(param.dtype)
            for param, change in zip(params, jax.tree.leaves(added), strict=True)
        )
        return moved, state

    def _tree(self, leaves: Sequence[Any]) -> Any:
        """The whole tree with None for what other stages keep."""
        own = dict(zip(self.leaves, leaves, strict=True))
        return jax.tree.unflatten(
            self.structure, [own.get(one) for one in range(self.structure.num_leaves)]
        )

    def _struct(self, leaf: Any, like: Struct | None) -> Struct:
        same = like is not None and like.shape == leaf.shape
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        sharding = like.sharding if same and like else everywhere
        return Struct(leaf.shape, leaf.dtype, sharding=sharding)


def plan_updates(
    parts: Parts, likes: Sequence[Structs], optimizer: Optimizer, clip_norm: float | None
) -> tuple[StageUpdate, ...]:
    """The updates of all stages.

    Args:
      likes: of each stage the parameters that it keeps, with their shardings.
    """
    return tuple(
        StageUpdate(
            optimizer=optimizer,
            clip_norm=clip_norm,
            mesh=mesh,
            structure=parts.structures[0],
            leaves=leaves,
            likes=tuple(like),
        )
        for mesh, leaves, like in zip(parts.meshes, parts.owned, likes, strict=True)
    )


class Updates:
    """The compiled programs of all stages' updates.

    Attributes:
      states: of each stage shapes and shardings of the optimizer's state.
      programs: of each stage of this process the one that updates.
    """

    def __init__(
        self,
        pipeline: CompiledPipeline,
        planned: Sequence[StageUpdate],
        *,
        compile_one: CompileOne | None,
        only_programs: bool,
    ) -> None:
        self._pipeline = pipeline
        self._transfers = pipeline.stages.transfers
        self._planned = tuple(planned)
        self.states = tuple(one.state() for one in planned)
        here = pipeline.stages.here
        jobs = [Job(planned[stage].lower_update(), stage, "update") for stage in here]
        if not only_programs:
            jobs += [Job(planned[stage].lower_init(), stage, "init") for stage in here]
        compiled = compile_jobs(jobs, compile_one)
        self.programs = dict(zip(here, compiled, strict=False))
        self._init = dict(zip(here, compiled[len(here) :], strict=False))

    def init(self, params: Sequence[Any]) -> tuple[Any, ...]:
        """The optimizer's first states."""
        return tuple(
            self._init[stage](tuple(params[leaf] for leaf in one.leaves))
            if stage in self._init
            else self._transfers.placeholders(self.states[stage])
            for stage, one in enumerate(self._planned)
        )

    def apply(
        self, params: Sequence[Any], gradients: Sequence[Any], states: tuple[Any, ...], norm: Any
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """New parameters and states; the old ones are given away."""
        new, kept = list(params), list[Any]()
        everywhere = self._pipeline.finisher.everywhere
        for stage, one in enumerate(self._planned):
            own_norm = self._transfers.move(norm, everywhere[stage])
            if stage in self.programs:
                moved, state = self.programs[stage](
                    tuple(params[leaf] for leaf in one.leaves),
                    tuple(gradients[leaf] for leaf in one.leaves),
                    states[stage],
                    own_norm,
                )
            else:
                moved, state = (
                    self._transfers.placeholders(likes) for likes in (one.likes, self.states[stage])
                )
            kept.append(state)
            for leaf, array in zip(one.leaves, moved, strict=True):
                new[leaf] = array
        return new, tuple(kept)


def _shrink(norm: Any, clip_norm: float | None) -> Any:
    """What gradients are multiplied with, so that their norm is at most `clip_norm`."""
    if clip_norm is None:
        return jnp.ones(())
    return jnp.where(norm > clip_norm, clip_norm / norm, 1.0)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
