"""The end of a step: turns the sums into gradients, their norm, and new parameters (jax)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from automesh_pipeline.runtime.split.arguments import Struct, Structs
from automesh_pipeline.runtime.split.parts import Parts
from automesh_pipeline.runtime.stages.compile import CompiledStages, Job
from automesh_pipeline.runtime.stages.stage import Optimizer, StageUpdate, shardings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGradients:
    """The gradients of a step.

    Attributes:
      gradients: the gradient of each parameter, on the stage that owns it.
      norm: the norm of all gradients together, on the first stage: the root of the sum of squares.
    """

    gradients: tuple[Any, ...]
    norm: Any


class Finisher:
    """Turns the sums of all stages into gradients.

    If several stages read a parameter, the first of them owns it, and the other stages send their
    sums to it.
    """

    def __init__(self, stages: CompiledStages) -> None:
        self._stages = stages
        self._users = stages.split.users
        self.owned, scale = stages.parts.owned, stages.parts.options.scale
        # The sharding of a scalar that is sent from stage to stage: a copy on every device of the
        # submesh.
        self.everywhere = tuple(NamedSharding(mesh, PartitionSpec()) for mesh in stages.meshes)
        self._add = jax.jit(
            lambda losses: functools.reduce(operator.add, losses) * scale,
            out_shardings=self.everywhere[-1],
        )
        self._finish: dict[int, Any] = {}
        self._norm: Any = None
        if not stages.compiler.only_programs:
            jobs = [Job(self._lower(stage), stage, "finish") for stage in stages.here]
            jobs += [Job(self._lower_norm(), None, "norm")] if 0 in stages.here else []
            compiled = stages.compiler.compile(jobs)
            self._finish = dict(zip(stages.here, compiled, strict=False))
            self._norm = compiled[-1]

    def finish(self, sums: Sequence[tuple[Any, ...]]) -> StepGradients:
        """Computes the gradients.

        Args:
          sums: for each stage, the sums of the parameters that it reads; their memory is reused.
        """
        transfers = self._stages.transfers
        gradients: dict[int, Any] = {}
        squares: list[Any] = []
        for stage, leaves in enumerate(self.owned):
            own = tuple(self._sum_of(sums, leaf, stage) for leaf in leaves)
            one = self._stages.shapes[stage]
            others = tuple(
                tuple(
                    transfers.move(self._sum_of(sums, leaf, user), like.sharding)
                    for user in self._users[leaf][1:]
                )
                for leaf, like in zip(leaves, one.owned(one.params), strict=True)
            )
            if stage in self._finish:
                finished, square = self._finish[stage](own, others)
            else:
                finished = transfers.placeholders(one.owned(one.params))
                square = transfers.placeholder(self._scalar(stage))
            gradients.update(zip(leaves, finished, strict=True))
            squares.append(transfers.move(square, self.everywhere[0]))
        ordered = tuple(gradients[leaf] for leaf in range(len(self._users)))
        is_here = 0 in self._finish
        norm = self._norm(tuple(squares)) if is_here else transfers.placeholder(self._scalar(0))
        return StepGradients(gradients=ordered, norm=norm)

    def add_losses(self, losses: Sequence[Any]) -> Any:
        """Adds the losses of all microbatches to one, on the last stage; with several processes
        each of them gets it."""
        last = len(self.owned) - 1
        if last in self._stages.here:
            return self._stages.transfers.tell(self._add(tuple(losses)))
        loss: Any = self._stages.functions[last].part.program.out_avals[0]
        like = Struct((), loss.dtype, sharding=self.everywhere[last])
        return self._stages.transfers.tell(self._stages.transfers.placeholder(like))

    def _scalar(self, stage: int) -> Struct:
        return Struct((), jnp.float32, sharding=self.everywhere[stage])

    def _sum_of(self, sums: Sequence[tuple[Any, ...]], leaf: int, stage: int) -> Any:
        return sums[stage][self._stages.split.stages[stage].params.index(leaf)]

    def _lower(self, stage: int) -> Any:
        one = self._stages.shapes[stage]
        params, likes = one.owned(one.params), one.owned(one.sums)
        others = tuple(
            (like,) * (len(self._users[leaf]) - 1)
            for leaf, like in zip(self.owned[stage], likes, strict=True)
        )
        # A gradient can only overwrite a sum that has the type of the parameter.
        in_place = all(sums.dtype == like.dtype for sums, like in zip(likes, params, strict=True))
        jitted = jax.jit(
            one.finish,
            donate_argnums=0 if in_place else (),
            out_shardings=(shardings_of(params), self.everywhere[stage]),
        )
        with jax.set_mesh(one.mesh):
            return jitted.lower(likes, others)

    def _lower_norm(self) -> Any:
        def norm(squares: tuple[Any, ...]) -> Any:
            return jnp.sqrt(functools.reduce(operator.add, squares))

        scalars = (self._scalar(0),) * len(self.owned)
        with jax.set_mesh(self._stages.meshes[0]):
            return jax.jit(norm, out_shardings=self.everywhere[0]).lower(scalars)


def plan_updates(
    parts: Parts, likes: Sequence[Structs], optimizer: Optimizer, clip_norm: float | None
) -> tuple[StageUpdate, ...]:
    """Plans the updates of all stages.

    Args:
      likes: for each stage, the parameters that it keeps, with their shardings.
    """
    return tuple(
        StageUpdate(
            parts=parts, number=number, likes=tuple(like), optimizer=optimizer, clip_norm=clip_norm
        )
        for number, like in enumerate(likes)
    )


class Updates:
    """The compiled programs of all stages' updates.

    Attributes:
      planned: the update of each stage.
      states: for each stage, shapes and shardings of the optimizer's state.
      programs: the update program of each stage of this process.
    """

    def __init__(self, stages: CompiledStages, planned: Sequence[StageUpdate]) -> None:
        self._transfers = stages.transfers
        self.planned = tuple(planned)
        self.states = tuple(one.state() for one in planned)
        here = stages.here
        jobs = [Job(planned[stage].lower_update(), stage, "update") for stage in here]
        if not stages.compiler.only_programs:
            jobs += [Job(planned[stage].lower_init(), stage, "init") for stage in here]
        compiled = stages.compiler.compile(jobs)
        self.programs = dict(zip(here, compiled, strict=False))
        self._init = dict(zip(here, compiled[len(here) :], strict=False))

    def init(self, params: Sequence[Any]) -> tuple[Any, ...]:
        """Makes the optimizer's first states."""
        return tuple(
            self._init[stage](tuple(params[leaf] for leaf in one.leaves))
            if stage in self._init
            else self._transfers.placeholders(self.states[stage])
            for stage, one in enumerate(self.planned)
        )

    def apply(
        self, params: Sequence[Any], gradients: Sequence[Any], states: tuple[Any, ...], norm: Any
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """Computes new parameters and states; the memory of the old ones is reused."""
        new, kept = list(params), list[Any]()
        for stage, one in enumerate(self.planned):
            own_norm = self._transfers.move(norm, one.everywhere)
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
