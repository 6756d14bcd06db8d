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

from automesh.pipeline.runtime.split.arguments import Struct, Structs
from automesh.pipeline.runtime.stages.compile import CompiledStages
from automesh.pipeline.runtime.stages.executables import CompileOne, Job, compile_jobs


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
      owned: of each stage the parameters that it keeps.
      scale: what gradients and losses are multiplied with.
      compile_one: see `compile_jobs`.
      only_programs: whether nothing is to be run.
    """

    def __init__(
        self,
        stages: CompiledStages,
        owned: tuple[tuple[int, ...], ...],
        *,
        scale: float,
        compile_one: CompileOne | None,
        only_programs: bool,
    ) -> None:
        self._stages = stages
        self._scale = scale
        self._users = stages.split.users
        self.owned = owned
        # What is on every device of a submesh, for scalars that go from stage to stage.
        self.everywhere = tuple(NamedSharding(mesh, PartitionSpec()) for mesh in stages.meshes)
        self._add = jax.jit(
            lambda losses: functools.reduce(operator.add, losses) * scale,
            out_shardings=self.everywhere[-1],
        )
        self._finish: dict[int, Any] = {}
        self._norm: Any = None
        if not only_programs:
            jobs = [Job(self._lower(stage), stage, "finish") for stage in stages.here]
            jobs += [Job(self._lower_norm(), None, "norm")] if 0 in stages.here else []
            compiled = compile_jobs(jobs, compile_one)
            self._finish = dict(zip(stages.here, compiled, strict=False))
            self._norm = compiled[-1]

    def finish(self, sums: Sequence[tuple[Any, ...]]) -> Finished:
        """The gradients.

        Args:
          sums: of each stage, of the parameters that it reads; given away.
        """
        transfers = self._stages.transfers
        gradients: dict[int, Any] = {}
        squares: list[Any] = []
        for stage, leaves in enumerate(self.owned):
            own = tuple(self._sum_of(sums, leaf, stage) for leaf in leaves)
            likes = self._owned_sums(stage)
            others = tuple(
                tuple(
                    transfers.move(self._sum_of(sums, leaf, user), like.sharding)
                    for user in self._users[leaf][1:]
                )
                for leaf, like in zip(leaves, likes, strict=True)
            )
            if stage in self._finish:
                finished, square = self._finish[stage](own, others)
            else:
                finished = transfers.placeholders(self.owned_params(stage))
                square = transfers.placeholder(self._scalar(stage))
            gradients.update(zip(leaves, finished, strict=True))
            squares.append(transfers.move(square, self.everywhere[0]))
        ordered = tuple(gradients[leaf] for leaf in range(len(self._users)))
        is_here = 0 in self._finish
        norm = self._norm(tuple(squares)) if is_here else transfers.placeholder(self._scalar(0))
        return Finished(gradients=ordered, norm=norm)

    def add_losses(self, losses: Sequence[Any]) -> Any:
        """The losses of all microbatches as one, on the last stage; whole on several processes."""
        last = len(self.owned) - 1
        if last in self._stages.here:
            return self._stages.transfers.tell(self._add(tuple(losses)))
        loss: Any = self._stages.functions[last].part.program.out_avals[0]
        like = Struct((), loss.dtype, sharding=self.everywhere[last])
        return self._stages.transfers.tell(self._stages.transfers.placeholder(like))

    def owned_params(self, stage: int) -> Structs:
        """Shapes and shardings of the parameters that a stage owns."""
        return self._pick(stage, self._stages.shapes[stage].params)

    def _scalar(self, stage: int) -> Struct:
        return Struct((), jnp.float32, sharding=self.everywhere[stage])

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
        shardings = (tuple(like.sharding for like in params), self.everywhere[stage])
        # Only what has the type of its parameter can become its gradient in place.
        in_place = all(one.dtype == like.dtype for one, like in zip(params, likes, strict=True))
        jitted = jax.jit(finish, donate_argnums=0 if in_place else (), out_shardings=shardings)
        with jax.set_mesh(self._stages.meshes[stage]):
            return jitted.lower(likes, others)

    def _lower_norm(self) -> Any:
        def norm(squares: tuple[Any, ...]) -> Any:
            return jnp.sqrt(functools.reduce(operator.add, squares))

        scalars = (self._scalar(0),) * len(self.owned)
        with jax.set_mesh(self._stages.meshes[0]):
            return jax.jit(norm, out_shardings=self.everywhere[0]).lower(scalars)
