"""The noun `Parts`: a loss as the functions of its stages, before anything is compiled (jax)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError
from automesh.pipeline.schedule import Schedule
from automesh_pipeline.runtime.options import PipelineOptions
from automesh_pipeline.runtime.split.arguments import (
    Arguments,
    Given,
    Struct,
    Structs,
    cut_rows,
    describe,
)
from automesh_pipeline.runtime.split.cut import SplitLoss, split_program
from automesh_pipeline.runtime.split.programs import StageFunctions, stage_functions
from automesh_pipeline.runtime.split.trace import trace_loss

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """A loss cut into stages, with what is known of its arguments.

    Attributes:
      functions, splits, meshes: one for each stage. The splits differ only in the mesh for which
        the loss was traced.
      params: the leaves of the loss's first argument.
      batch: the leaves of one microbatch.
      structures: the structures of the trees of parameters and batch.
      owned: for each stage, the parameters that it keeps and updates: it is the first stage that
        reads them.
    """

    options: PipelineOptions
    schedule: Schedule
    functions: tuple[StageFunctions, ...]
    splits: tuple[SplitLoss, ...]
    meshes: tuple[Mesh, ...]
    params: Arguments
    batch: Arguments
    structures: tuple[Any, Any]
    owned: tuple[tuple[int, ...], ...]

    @property
    def split(self) -> SplitLoss:
        """The arguments and results of the stages."""
        return self.splits[0]

    def in_order(self, of_stages: Sequence[Sequence[Any]]) -> list[Any]:
        """Turns lists of one item for each parameter that a stage keeps into one list in the order
        of the parameters."""
        found = {
            leaf: one
            for leaves, of_stage in zip(self.owned, of_stages, strict=True)
            for leaf, one in zip(leaves, of_stage, strict=True)
        }
        return [found[leaf] for leaf in range(len(found))]

    def owned_structs(self, stage: int) -> Structs:
        """Returns the parameters that a stage keeps, with the given shardings; those without one
        are on all of its devices."""
        mesh = self.meshes[stage]
        return tuple(
            struct if struct.sharding is not None else _everywhere(struct, mesh)
            for struct in self.params.structs(self.owned[stage], mesh)
        )

    def leaves(self, tree: Any, which: int) -> list[Any]:
        """Returns the leaves of parameters (0) or a batch (1).

        Raises:
          UsageError: the tree is not the one that the pipeline was made for.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self.structures[which]:
            what = ("the parameters", "the batch")[which]
            raise UsageError(
                f"{what} are not of the structure that the pipeline was compiled for: "
                f"{structure} instead of {self.structures[which]}"
            )
        return leaves


def split_pipeline(loss: Loss, options: PipelineOptions, params: Any, batch: Any) -> Parts:
    """Traces a loss and cuts it into stages; compiles nothing.

    Args:
      params, batch: arrays, abstract or not.

    Raises:
      UsageError: the batch or the loss cannot be cut, a given sharding does not fit a submesh, or
        the schedule does not fit the loss.
    """
    part = cut_rows(batch, num_microbatches=options.num_microbatches, dim=options.dim)
    known = jax.tree_util.tree_map_with_path(_describe_param, params)
    splits = _split_for_meshes(loss, options, known, part)
    num_stages = len(next(iter(splits.values())).stages)
    schedule = options.schedule_for(num_stages)
    meshes = tuple(options.mesh.submeshes[rank] for rank in schedule.homes)
    of_stages = tuple(splits[mesh.abstract_mesh] for mesh in meshes)
    residuals = options.residuals_of(num_stages)
    owners = of_stages[0].owners
    params_given = _arguments(known, "params", options)
    batch_given = _arguments(part, "batch", options)
    for split, stage, mesh in zip(of_stages, range(num_stages), meshes, strict=True):
        # A sharding that fits no submesh is reported before anything is cached.
        params_given.structs(split.stages[stage].params, mesh)
        batch_given.structs(split.stages[stage].batch, mesh)
    return Parts(
        options=options,
        schedule=schedule,
        functions=tuple(
            stage_functions(split, stage, residuals[stage]) for stage, split in enumerate(of_stages)
        ),
        splits=of_stages,
        meshes=meshes,
        params=params_given,
        batch=batch_given,
        structures=(jax.tree.structure(params), jax.tree.structure(batch)),
        owned=tuple(
            tuple(leaf for leaf in one.params if owners[leaf] == stage)
            for stage, one in enumerate(of_stages[0].stages)
        ),
    )


def shapes_key(*trees: Any) -> Any:
    """Returns a key that is equal for arguments with which the same programs are run."""
    return (
        jax.tree.structure(trees),
        tuple((one.shape, one.dtype) for one in map(describe, jax.tree.leaves(trees))),
    )


def _everywhere(like: Struct, mesh: Mesh) -> Struct:
    return Struct(like.shape, like.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def _describe_param(path: Any, leaf: Any) -> Given:
    given = describe(leaf)
    if not jnp.issubdtype(given.dtype, jnp.floating):
        raise UsageError(
            f"params{jax.tree_util.keystr(path)} is of {given.dtype}, which has no gradient",
            hint="give what is not trained as a part of the batch, or close over it",
        )
    return given


def _arguments(tree: Any, root: str, options: PipelineOptions) -> Arguments:
    leaves = cast("list[tuple[Any, Given]]", jax.tree_util.tree_leaves_with_path(tree))
    return Arguments(
        given=tuple(leaf for _, leaf in leaves),
        names=tuple(f"{root}{jax.tree_util.keystr(path)}" for path, _ in leaves),
        dropped=options.mesh.axis,
    )


def _split_for_meshes(
    loss: Loss, options: PipelineOptions, params: Any, batch: Any
) -> dict[jax.sharding.AbstractMesh, SplitLoss]:
    """Returns the split loss for each shape of submesh: the shardings inside it depend only on the
    shape."""
    splits: dict[jax.sharding.AbstractMesh, SplitLoss] = {}
    for mesh in options.mesh.submeshes:
        if mesh.abstract_mesh not in splits:
            program = trace_loss(
                loss,
                jax.tree.map(lambda given: given.struct, params),
                jax.tree.map(lambda given: given.struct, batch),
                mesh=mesh,
                rules=options.rules,
            )
            splits[mesh.abstract_mesh] = split_program(program)
    return splits
