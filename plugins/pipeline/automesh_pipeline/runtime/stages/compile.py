"""Compiles the programs of all stages ahead of time, each for its submesh (jax).

If no sharding is given, XLA chooses one: the argument is left unspecified, and the sharding of the
compiled forward pass is read back. It is expressed by the axes of the mesh where that is possible,
and all other programs must use it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from automesh.pipeline.actions import ActionKind
from automesh_pipeline.runtime.dispatch_plan import PipelineSlots, StageSlots
from automesh_pipeline.runtime.split.arguments import Struct, Structs, divides, is_same_layout
from automesh_pipeline.runtime.split.parts import Parts
from automesh_pipeline.runtime.stages.stage import Stage, given_arguments, shardings_of
from automesh_pipeline.runtime.stages.transfer import ArrayTransfers

# (a lowered program, its stage, what it does: an action's kind, or `zeros`, `finish`, `norm`,
# `init`, `update`) -> the function that runs it
CompileOne = Callable[[jax.stages.Lowered, int | None, str], Any]


class Job(NamedTuple):
    """A program that will be compiled.

    Attributes:
      stage: its stage; None for a program of no stage.
      what: see `CompileOne`.
    """

    lowered: jax.stages.Lowered
    stage: int | None
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCompiler:
    """The way in which the programs of a pipeline are compiled.

    Attributes:
      compile_one: compiles a program; it is called for one after the other, so that it can keep
        account of them. None compiles several at a time, since XLA does not hold Python's lock.
      only_programs: whether helper programs, which are only needed to run the stages, are left out,
        for absent devices.
    """

    compile_one: CompileOne | None = None
    only_programs: bool = False

    def compile(self, jobs: Iterable[Job]) -> tuple[Any, ...]:
        """Compiles some programs, and returns their executables in their order."""
        listed = tuple(jobs)
        if self.compile_one is not None:
            return tuple(self.compile_one(*job) for job in listed)
        if not listed:
            return ()
        with ThreadPoolExecutor(min(len(listed), os.cpu_count() or 1)) as pool:
            return tuple(pool.map(lambda job: job.lowered.compile(), listed))


class CompiledStages:
    """The programs of all stages; those of the backward pass are compiled when they are first
    needed.

    Attributes:
      functions, split, meshes: see `Parts`.
      transfers: moves arrays between the submeshes.
      shapes: each stage, with the arguments and results of its compiled forward pass.
      places: shardings by number; see `PipelineSlots`.
      zeros: for each stage of this process, a program without arguments that makes its first sums.

    Args:
      forward: the lowered forward pass of each stage.
    """

    def __init__(
        self, parts: Parts, forward: Sequence[jax.stages.Lowered], compiler: ProgramCompiler
    ) -> None:
        self.parts, self.compiler = parts, compiler
        self.functions, self.split, self.meshes = parts.functions, parts.split, parts.meshes
        self.transfers = ArrayTransfers(parts.meshes, is_run=not compiler.only_programs)
        # Those of other processes are compiled, too: they show what the stages of this process
        # receive.
        self.forward = compiler.compile(Job(one, stage, "F") for stage, one in enumerate(forward))
        self.shapes = tuple(
            _compiled_stage(parts, stage, program, lowered)
            for stage, (program, lowered) in enumerate(zip(self.forward, forward, strict=True))
        )
        self.places: list[Sharding] = []
        self.slots = PipelineSlots(stages=tuple(map(self._wire, self.shapes)))
        self._backward: dict[tuple[int, ActionKind], Any] = {}
        self.zeros: dict[int, Any] = {}
        if not compiler.only_programs:
            jobs = [Job(_lower_zeros(self.shapes[stage]), stage, "zeros") for stage in self.here]
            self.zeros.update(zip(self.here, compiler.compile(jobs), strict=True))

    def prepare(self, needed: Iterable[tuple[int, ActionKind]]) -> None:
        """Compiles the missing backward programs of this process' stages."""
        here = {one for one in needed if one[0] in self.here}
        missing = sorted(here - set(self._backward))
        jobs = (
            Job(_lower_backward(self.shapes[stage], kind), stage, kind) for stage, kind in missing
        )
        self._backward.update(zip(missing, self.compiler.compile(jobs), strict=True))

    @property
    def here(self) -> tuple[int, ...]:
        """The stages that this process runs; all stages if there is one process."""
        return tuple(
            stage for stage, mesh in enumerate(self.meshes) if self.transfers.is_here(mesh)
        )

    def backward(self, stage: int, kind: ActionKind) -> Any:
        """Returns the program of an action of a kind that `prepare` has compiled."""
        return self._backward[stage, kind]

    @property
    def programs(self) -> Mapping[tuple[int, ActionKind], Any]:
        """All programs that this process runs, by stage and kind: `jax.stages.Compiled`."""
        forward: dict[tuple[int, ActionKind], Any] = {
            (stage, "F"): self.forward[stage]
            for stage in self.here
            if not self.functions[stage].skips_forward
        }
        return {**forward, **self._backward}

    def _wire(self, stage: Stage) -> StageSlots:
        one, part = stage.function, stage.function.part
        return StageSlots(
            batch=dict(zip(part.batch, map(self._place, stage.batch), strict=True)),
            inputs=dict(zip(part.inputs, map(self._place, stage.inputs), strict=True)),
            outputs=dict(zip(part.outputs, map(self._place, stage.outputs), strict=False)),
            with_gradient=frozenset(
                value for value, has in zip(part.inputs, one.with_gradient, strict=True) if has
            ),
            has_weights=bool(part.params),
            is_last=one.is_last,
            skips_forward=one.skips_forward,
            saves=one.residuals == "save",
        )

    def _place(self, like: Struct) -> int:
        """Returns the number of a sharding; equivalent shardings have the same number."""
        sharding = cast("Sharding", like.sharding)
        for number, known in enumerate(self.places):
            if known.device_set == sharding.device_set and _equivalent(known, sharding, like):
                return number
        self.places.append(sharding)
        return len(self.places) - 1


def lower_forward(parts: Parts) -> tuple[jax.stages.Lowered, ...]:
    """Lowers the forward pass of each stage for its submesh.

    Raises:
      UsageError: a given sharding does not fit a submesh.
    """
    return tuple(_lower_stage(parts, stage) for stage in range(len(parts.functions)))


def _lower_stage(parts: Parts, stage: int) -> jax.stages.Lowered:
    with jax.set_mesh(parts.meshes[stage]):
        return jax.jit(parts.functions[stage].forward).lower(*given_arguments(parts, stage))


def _lower_backward(stage: Stage, kind: ActionKind) -> jax.stages.Lowered:
    jitted, arguments = stage.action(kind)
    with jax.set_mesh(stage.mesh):
        return jitted.lower(*arguments)


def _lower_zeros(stage: Stage) -> jax.stages.Lowered:
    likes = stage.sums

    def zeros() -> tuple[Any, ...]:
        return tuple(jnp.zeros(like.shape, like.dtype) for like in likes)

    with jax.set_mesh(stage.mesh):
        return jax.jit(zeros, out_shardings=shardings_of(likes)).lower()


def _compiled_stage(parts: Parts, number: int, program: Any, lowered: Any) -> Stage:
    def known(tree: Any, shardings: Any) -> Structs:
        likes = jax.tree.leaves(tree)
        found = jax.tree.leaves(shardings, is_leaf=lambda node: node is None)
        return tuple(
            Struct(like.shape, like.dtype, sharding=_usable(sharding, like.shape, mesh))
            for like, sharding in zip(likes, found, strict=True)
        )

    mesh = parts.meshes[number]
    (params, batch, inputs), _ = lowered.args_info
    of_params, of_batch, of_inputs = program.input_shardings[0]
    outputs, saved = lowered.out_info
    of_outputs, of_saved = program.output_shardings
    return Stage(
        parts=parts,
        number=number,
        params=known(params, of_params),
        batch=known(batch, of_batch),
        inputs=known(inputs, of_inputs),
        outputs=known(outputs, of_outputs),
        saved=known(saved, of_saved),
    )


def _usable(sharding: Sharding | None, shape: Sequence[int], mesh: Mesh) -> Sharding:
    """Returns a sharding that arrays can have: an array that XLA pads or does not read gets a copy
    on every device."""
    if sharding is None or mesh.size == 1 or not divides(sharding, shape):
        return NamedSharding(mesh, PartitionSpec())
    return name_sharding(sharding, shape, mesh)


def _equivalent(some: Sharding, other: Sharding, like: Struct) -> bool:
    try:
        return some.is_equivalent_to(other, len(like.shape))
    # The array may have fewer dimensions than one of the shardings.
    except (ValueError, IndexError):
        return False


def name_sharding(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> Sharding:
    """Expresses a sharding over the devices of a mesh as a `NamedSharding` on it.

    Args:
      shape: the shape of an array that can have the sharding.

    Returns:
      The named sharding; the given one if no axes of the mesh can express it.
    """
    if isinstance(sharding, NamedSharding):
        return sharding
    parts = [whole // part for whole, part in _sizes(sharding, shape)]
    for spec in _specs(parts, [name for name in mesh.axis_names if mesh.shape[name] > 1], mesh):
        named = NamedSharding(mesh, PartitionSpec(*spec))
        if is_same_layout(named, sharding, shape):
            return named
    return sharding


def _sizes(sharding: Sharding, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    # A dimension without elements has one part.
    for whole, part in zip(shape, sharding.shard_shape(tuple(shape)), strict=True):
        yield (whole, part) if part else (1, 1)


def _specs(
    parts: Sequence[int], axes: Sequence[str], mesh: Mesh
) -> Iterator[tuple[tuple[str, ...] | None, ...]]:
    """Yields all ways to split dimensions into so many parts by different axes, in every order."""
    if not parts:
        yield ()
        return
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            if math.prod(mesh.shape[name] for name in chosen) == parts[0]:
                left = [name for name in axes if name not in chosen]
                for others in _specs(parts[1:], left, mesh):
                    yield (chosen or None, *others)
