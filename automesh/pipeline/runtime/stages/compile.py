"""Compiles the programs of all stages ahead of time, each for its submesh (jax).

Where no sharding is given, XLA chooses: an argument is left unspecified, and the sharding that the
compiled forward pass takes is read back and fixed for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from automesh.pipeline.actions import ActionKind
from automesh.pipeline.runtime.dispatch_plan import PipelineSlots, StageSlots
from automesh.pipeline.runtime.split.arguments import Struct, Structs, divides
from automesh.pipeline.runtime.split.parts import Parts
from automesh.pipeline.runtime.stages.executables import CompileOne, Job, compile_jobs
from automesh.pipeline.runtime.stages.naming import name_sharding
from automesh.pipeline.runtime.stages.transfer import ArrayTransfers

Shardings = tuple[Sharding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShapes:
    """Shapes, types and shardings of what a stage reads and makes.

    Attributes:
      params, batch, inputs, outputs: as the compiled forward pass takes and gives them.
      saved: what it keeps for the backward pass.
    """

    params: Structs
    batch: Structs
    inputs: Structs
    outputs: Structs
    saved: Structs


class CompiledStages:
    """The programs of all stages; those of the backward pass are compiled when asked for.

    Attributes:
      functions, split, meshes: see `Parts`.
      transfers: between the submeshes; knows which stages are of this process.
      shapes: of each stage.
      places: shardings by number; see `PipelineSlots`.
      zeros: of each stage that is run here a program without arguments that makes its first sums.

    Args:
      forward: of each stage its lowered forward pass.
      compile_one: see `compile_jobs`.
      only_programs: whether what is needed to run the programs is left out.
    """

    def __init__(
        self,
        parts: Parts,
        forward: Sequence[jax.stages.Lowered],
        *,
        compile_one: CompileOne | None,
        only_programs: bool,
    ) -> None:
        self.functions, self.split, self.meshes = parts.functions, parts.split, parts.meshes
        self._compile_one = compile_one
        self.transfers = ArrayTransfers(parts.meshes, is_run=not only_programs)
        # Those of other processes, too: they tell what the stages of this one get.
        jobs = [Job(one, stage, "F") for stage, one in enumerate(forward)]
        self.forward = compile_jobs(jobs, compile_one)
        self.shapes = tuple(
            _read_shapes(program, low, mesh)
            for program, low, mesh in zip(self.forward, forward, parts.meshes, strict=True)
        )
        self.places: list[Sharding] = []
        self.slots = PipelineSlots(stages=tuple(map(self._wire, range(len(self.functions)))))
        self._backward: dict[tuple[int, ActionKind], Any] = {}
        self.zeros: dict[int, Any] = {}
        if not only_programs:
            jobs = [Job(self._lower_zeros(stage), stage, "zeros") for stage in self.here]
            self.zeros.update(zip(self.here, compile_jobs(jobs, compile_one), strict=True))

    def prepare(self, needed: Iterable[tuple[int, ActionKind]]) -> None:
        """Compiles backward programs of this process' stages that are not compiled yet."""
        here = {one for one in needed if one[0] in self.here}
        missing = sorted(here - set(self._backward))
        jobs = (Job(self._lower_backward(*one), *one) for one in missing)
        self._backward.update(zip(missing, compile_jobs(jobs, self._compile_one), strict=True))

    @property
    def here(self) -> tuple[int, ...]:
        """The stages that this process runs: all, if there is one process."""
        return tuple(
            stage for stage, mesh in enumerate(self.meshes) if self.transfers.is_here(mesh)
        )

    def backward(self, stage: int, kind: ActionKind) -> Any:
        """The program of an action of a kind that `prepare` has compiled."""
        return self._backward[stage, kind]

    @property
    def programs(self) -> Mapping[tuple[int, ActionKind], Any]:
        """Every program that this process runs, by stage and kind: `jax.stages.Compiled`."""
        forward: dict[tuple[int, ActionKind], Any] = {
            (stage, "F"): self.forward[stage]
            for stage in self.here
            if not self.functions[stage].skips_forward
        }
        return {**forward, **self._backward}

    def sums(self, stage: int) -> Structs:
        """Of a stage's parameters what their gradients are summed in: at least float32."""
        return tuple(
            Struct(one.shape, jnp.promote_types(one.dtype, jnp.float32), sharding=one.sharding)
            for one in self.shapes[stage].params
        )

    def gradients(self, stage: int) -> tuple[Structs, ...]:
        """Of each output with a gradient what every stage that reads it sends back."""
        one = self.functions[stage]
        outputs = zip(
            one.part.outputs,
            self.shapes[stage].outputs,
            one.outputs_with_gradient,
            strict=False,  # The last stage's output is the loss, which is no value.
        )
        return tuple(
            (like,) * len(self.split.values[value].consumers) for value, like, has in outputs if has
        )

    def _lower_backward(self, stage: int, kind: ActionKind) -> Any:
        one, shapes = self.functions[stage], self.shapes[stage]
        gradients = self.gradients(stage)
        sums = self.sums(stage) if kind != "I" else ()
        inputs = [like for like, has in zip(shapes.inputs, one.with_gradient, strict=True) if has]
        jitted = jax.jit(
            one.backward(kind),
            donate_argnums=5,
            out_shardings=(_shardings(sums), _shardings(inputs) if kind != "W" else (), None),
        )
        with jax.set_mesh(self.meshes[stage]):
            return jitted.lower(
                shapes.params, shapes.batch, shapes.inputs, shapes.saved, gradients, sums
            )

    def _lower_zeros(self, stage: int) -> Any:
        likes = self.sums(stage)

        def zeros() -> tuple[Any, ...]:
            return tuple(jnp.zeros(like.shape, like.dtype) for like in likes)

        with jax.set_mesh(self.meshes[stage]):
            return jax.jit(zeros, out_shardings=_shardings(likes)).lower()

    def _wire(self, stage: int) -> StageSlots:
        one, shapes = self.functions[stage], self.shapes[stage]
        part = one.part
        return StageSlots(
            batch=dict(zip(part.batch, map(self._place, shapes.batch), strict=True)),
            inputs=dict(zip(part.inputs, map(self._place, shapes.inputs), strict=True)),
            outputs=dict(zip(part.outputs, map(self._place, shapes.outputs), strict=False)),
            with_gradient=frozenset(
                value for value, has in zip(part.inputs, one.with_gradient, strict=True) if has
            ),
            has_weights=bool(part.params),
            is_last=one.is_last,
            skips_forward=one.skips_forward,
            saves=one.residuals == "save",
        )

    def _place(self, like: Struct) -> int:
        """The number of a sharding; equivalent ones have the same."""
        sharding = cast("Sharding", like.sharding)
        for number, known in enumerate(self.places):
            if known.device_set == sharding.device_set and _equivalent(known, sharding, like):
                return number
        self.places.append(sharding)
        return len(self.places) - 1


def lower_forward(parts: Parts) -> tuple[jax.stages.Lowered, ...]:
    """Of each stage its forward pass, lowered for its submesh.

    Raises:
      UsageError: a sharding that was given does not fit a submesh.
    """
    return tuple(_lower_stage(parts, stage) for stage in range(len(parts.functions)))


def _lower_stage(parts: Parts, stage: int) -> jax.stages.Lowered:
    one, split, mesh = parts.functions[stage], parts.splits[stage], parts.meshes[stage]
    part = one.part
    with jax.set_mesh(mesh):
        return jax.jit(one.forward).lower(
            parts.params.structs(part.params, mesh),
            parts.batch.structs(part.batch, mesh),
            tuple(split.values[value].like for value in part.inputs),
        )


def _read_shapes(program: Any, lowered: Any, mesh: Mesh) -> StageShapes:
    def known(tree: Any, shardings: Any) -> Structs:
        likes = jax.tree.leaves(tree)
        found = jax.tree.leaves(shardings, is_leaf=lambda node: node is None)
        return tuple(
            Struct(like.shape, like.dtype, sharding=_usable(sharding, like.shape, mesh))
            for like, sharding in zip(likes, found, strict=True)
        )

    (params, batch, inputs), _ = lowered.args_info
    of_params, of_batch, of_inputs = program.input_shardings[0]
    outputs, saved = lowered.out_info
    of_outputs, of_saved = program.output_shardings
    return StageShapes(
        params=known(params, of_params),
        batch=known(batch, of_batch),
        inputs=known(inputs, of_inputs),
        outputs=known(outputs, of_outputs),
        saved=known(saved, of_saved),
    )


def _usable(sharding: Sharding | None, shape: Sequence[int], mesh: Mesh) -> Sharding:
    """A sharding that arrays can have; what XLA pads or does not read is on every device."""
    if sharding is None or mesh.size == 1 or not divides(sharding, shape):
        return NamedSharding(mesh, PartitionSpec())
    return name_sharding(sharding, shape, mesh)


def _equivalent(some: Sharding, other: Sharding, like: Struct) -> bool:
    try:
        return some.is_equivalent_to(other, len(like.shape))
    # Of an array with fewer dimensions than one of the shardings has.
    except (ValueError, IndexError):
        return False


def _shardings(structs: Iterable[Struct]) -> Shardings:
    return tuple(cast("Sharding", one.sharding) for one in structs)
