"""From each stage's sums to gradients: shared ones added, all scaled, their norm taken (jax)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from automesh.pipeline.runtime.arguments import Struct, Structs
from automesh.pipeline.runtime.compiling import CompiledStages, compile_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The gradients of a step.

    Attributes:
      gradients: of each parameter, on the stage that owns it.
      norm: of all gradients together, on the first stage: the root of the sum of squares.
    """

    gradients: tuple[Any, ...]
    norm: Any


class Finisher:
    """Turns the sums of all stages into gradients.

    A parameter that several stages read is owned by the first: the others' sums are sent there.

    Args:
      scale: what gradients and losses are multiplied with.
    """

    def __init__(self, stages: CompiledStages, *, scale: float) -> None:
        self._stages = stages
        self._scale = scale
        self._users = stages.split.users
        self.owned = tuple(
            tuple(leaf for leaf in part.params if self._users[leaf][0] == stage)
            for stage, part in enumerate(stages.split.stages)
        )
        lowered = [self._lower(stage) for stage in range(len(self.owned))]
        # What is on every device of a submesh, for scalars that go from stage to stage.
        self.everywhere = tuple(NamedSharding(mesh, PartitionSpec()) for mesh in stages.meshes)
        norm = self._lower_norm()
        *self._finish, self._norm = compile_all([*lowered, norm])

    def finish(self, sums: Sequence[tuple[Any, ...]]) -> Finished:
        """The gradients.

        Args:
          sums: of each stage, of the parameters that it reads; given away.
        """
        gradients: dict[int, Any] = {}
        squares: list[Any] = []
        for stage, leaves in enumerate(self.owned):
            own = tuple(self._sum_of(sums, leaf, stage) for leaf in leaves)
            likes = self._owned_sums(stage)
            others = tuple(
                tuple(
                    jax.device_put(self._sum_of(sums, leaf, user), like.sharding)
                    for user in self._users[leaf][1:]
                )
                for leaf, like in zip(leaves, likes, strict=True)
            )
            finished, square = self._finish[stage](own, others)
            gradients.update(zip(leaves, finished, strict=True))
            squares.append(jax.device_put(square, self.everywhere[0]))
        ordered = tuple(gradients[leaf] for leaf in range(len(self._users)))
        return Finished(gradients=ordered, norm=self._norm(tuple(squares)))

    def owned_params(self, stage: int) -> Structs:
        """Shapes and shardings of the parameters that a stage owns."""
        return self._pick(stage, self._stages.shapes[stage].params)

    def _owned_sums(self, stage: int) -> Structs:
        return self._pick(stage, self._stages.sums(stage))

    def _pick(self, stage: int, of_params: Structs) -> Structs:
        places = self._stages.split.stages[stage].params
        return tuple(of_params[places.index(leaf)] for leaf in self.owned[stage])

    def _sum_of(self, sums: Sequence[tuple[Any, ...]], leaf: int, stage: int) -> Any:
        return sums[stage][self._stages.split.stages[stage].params.index(leaf)]

    def _lower(self, stage: int) -> Any:
        params, likes = self.owned_params(stage), self._owned_sums(stage)

        def finish(own: tuple[Any, ...], others: tuple[tuple[Any, ...], ...]) -> Any:
            totals = [
                functools.reduce(operator.add, more, total) * self._scale
                for total, more in zip(own, others, strict=True)
            ]
            squares = (jnp.sum(jnp.square(one), dtype=jnp.float32) for one in totals)
            gradients = tuple(
                total.astype(like.dtype) for total, like in zip(totals, params, strict=True)
            )
            return gradients, sum(squares, start=jnp.zeros((), jnp.float32))

        others = tuple(
            (like,) * (len(self._users[leaf]) - 1)
            for leaf, like in zip(self.owned[stage], likes, strict=True)
        )
        shardings = tuple(like.sharding for like in params)
        # Only what has the type of its parameter can become its gradient in place.
        in_place = all(one.dtype == like.dtype for one, like in zip(params, likes, strict=True))
        jitted = jax.jit(
            finish, donate_argnums=0 if in_place else (), out_shardings=(shardings, None)
        )
        with jax.set_mesh(self._stages.meshes[stage]):
            return jitted.lower(likes, others)

    def _lower_norm(self) -> Any:
        def norm(squares: tuple[Any, ...]) -> Any:
            return jnp.sqrt(functools.reduce(operator.add, squares))

        scalar = Struct((), jnp.float32, sharding=self.everywhere[0])
        with jax.set_mesh(self._stages.meshes[0]):
            return jax.jit(norm).lower((scalar,) * len(self.owned))


def add_losses(losses: Sequence[Any], scale: float) -> Any:
    """The losses of all microbatches as one."""
    return _add(tuple(losses), scale)


@jax.jit
def _add(losses: tuple[Any, ...], scale: float) -> Any:
    return functools.reduce(operator.add, losses) * scale
