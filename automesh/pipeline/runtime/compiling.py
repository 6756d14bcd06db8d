"""Compiles the programs of all stages ahead of time, each for its submesh (jax).

Where no sharding is given, XLA chooses: an argument is left unspecified, and the sharding that the
compiled forward pass takes is read back and fixed for everything else.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from automesh.pipeline.actions import ActionKind
from automesh.pipeline.runtime.arguments import Arguments, Struct, Structs, divides
from automesh.pipeline.runtime.programs import StageFunctions
from automesh.pipeline.runtime.splitting import Split
from automesh.pipeline.runtime.steps import StageWiring, Wiring

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
      split: what the stages read and make.
      shapes: of each stage.
      places: shardings by number; see `Wiring`.
      zeros: of each stage a program without arguments that makes its first sums.

    Args:
      functions: of each stage.
      splits: of each stage the split that its functions are of; they differ in nothing but the
        mesh for which the loss was traced.
      meshes: of each stage its submesh.
      params: the leaves of the loss's first argument.
      batch: of one microbatch.
    """

    def __init__(
        self,
        functions: Sequence[StageFunctions],
        splits: Sequence[Split],
        meshes: Sequence[Mesh],
        *,
        params: Arguments,
        batch: Arguments,
    ) -> None:
        self.functions = tuple(functions)
        self.split = splits[0]
        self.meshes = tuple(meshes)
        lowered = [
            _lower_forward(one, split, mesh, params=params, batch=batch)
            for one, split, mesh in zip(functions, splits, meshes, strict=True)
        ]
        self.forward: tuple[Any, ...] = compile_all(lowered)
        self.shapes = tuple(
            _read_shapes(program, low, mesh)
            for program, low, mesh in zip(self.forward, lowered, meshes, strict=True)
        )
        self.places: list[Sharding] = []
        self.wiring = Wiring(stages=tuple(map(self._wire, range(len(self.functions)))))
        self._backward: dict[tuple[int, ActionKind], Any] = {}
        self.zeros: tuple[Any, ...] = compile_all(
            [self._lower_zeros(stage) for stage in range(len(self.functions))]
        )

    def prepare(self, needed: Iterable[tuple[int, ActionKind]]) -> None:
        """Compiles backward programs that are not compiled yet."""
        missing = sorted(set(needed) - set(self._backward))
        lowered = [self._lower_backward(stage, kind) for stage, kind in missing]
        self._backward.update(zip(missing, compile_all(lowered), strict=True))

    def backward(self, stage: int, kind: ActionKind) -> Any:
        """The program of an action of a kind that `prepare` has compiled."""
        return self._backward[stage, kind]

    @property
    def programs(self) -> Mapping[tuple[int, ActionKind], Any]:
        """Every program that is run, by stage and kind: `jax.stages.Compiled`."""
        forward: dict[tuple[int, ActionKind], Any] = {
            (stage, "F"): program
            for stage, (program, one) in enumerate(zip(self.forward, self.functions, strict=True))
            if not one.skips_forward
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

    def _wire(self, stage: int) -> StageWiring:
        one, shapes = self.functions[stage], self.shapes[stage]
        part = one.part
        return StageWiring(
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


def compile_all(lowered: Sequence[Any]) -> tuple[Any, ...]:
    """Compiles several programs at a time; XLA does not hold Python's lock."""
    if not lowered:
        return ()
    with ThreadPoolExecutor(min(len(lowered), os.cpu_count() or 1)) as pool:
        return tuple(pool.map(lambda one: one.compile(), lowered))


def _lower_forward(
    one: StageFunctions,
    split: Split,
    mesh: Mesh,
    *,
    params: Arguments,
    batch: Arguments,
) -> Any:
    part = one.part
    with jax.set_mesh(mesh):
        return jax.jit(one.forward).lower(
            params.structs(part.params, mesh),
            batch.structs(part.batch, mesh),
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
    return sharding


def _equivalent(some: Sharding, other: Sharding, like: Struct) -> bool:
    try:
        return some.is_equivalent_to(other, len(like.shape))
    # Of an array with fewer dimensions than one of the shardings has.
    except (ValueError, IndexError):
        return False


def _shardings(structs: Iterable[Struct]) -> Shardings:
    return tuple(cast("Sharding", one.sharding) for one in structs)
