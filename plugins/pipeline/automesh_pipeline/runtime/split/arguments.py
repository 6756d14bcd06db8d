"""The shapes, types and given shardings of a loss's arguments (jax)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from automesh.errors import UsageError
from automesh.mesh.layout.shardings import axes_of_entry

Struct = jax.ShapeDtypeStruct
Structs = tuple[Struct, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The shape, type and given sharding of an argument.

    Attributes:
      sharding: a sharding on any mesh; None if XLA chooses it.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding | None

    @property
    def struct(self) -> Struct:
        """Its shape and type alone."""
        return Struct(self.shape, self.dtype)


def describe(leaf: Any) -> Given:
    """Describes an array, abstract or not: only a `NamedSharding` counts as given."""
    sharding = getattr(leaf, "sharding", None)
    return Given(
        shape=tuple(jnp.shape(leaf)),
        dtype=jnp.result_type(leaf),
        sharding=sharding if isinstance(sharding, NamedSharding) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The leaves of one argument of a loss.

    Attributes:
      names: the name of each leaf, for errors.
      dropped: the axis of the pipeline, which submeshes do not have.
    """

    given: tuple[Given, ...]
    names: tuple[str, ...]
    dropped: str

    def structs(self, leaves: Sequence[int], mesh: Mesh) -> Structs:
        """Returns some leaves as a submesh gets them, with the given shardings moved to it.

        Raises:
          UsageError: a sharding names axes that the submesh does not have, or that do not divide
            the array.
        """
        return tuple(
            _on_submesh(self.given[leaf], mesh, dropped=self.dropped, what=self.names[leaf])
            for leaf in leaves
        )


def _on_submesh(given: Given, mesh: Mesh, *, dropped: str, what: str) -> Struct:
    if given.sharding is None:
        return given.struct
    entries = [
        tuple(
            axis for axis in axes_of_entry(entry) if axis != dropped or dropped in mesh.axis_names
        )
        for entry in given.sharding.spec
    ]
    unknown = [axis for entry in entries for axis in entry if axis not in mesh.axis_names]
    if unknown:
        raise UsageError(
            f"{what} is split over the mesh axis `{unknown[0]}`, which the submesh of its stage "
            f"does not have; it has {', '.join(mesh.axis_names)}"
        )
    sharding = NamedSharding(mesh, PartitionSpec(*(entry or None for entry in entries)))
    if not divides(sharding, given.shape):
        raise UsageError(
            f"{what} of shape {list(given.shape)} cannot be split by {sharding.spec} over a "
            f"submesh of {dict(mesh.shape)}",
            hint="every dimension must be a multiple of the axes that split it; for the batch "
            "that is the rows of one microbatch",
        )
    return Struct(given.shape, given.dtype, sharding=sharding)


def cut_rows(batch: Any, *, num_microbatches: int, dim: int) -> Any:
    """Describes the arrays of one microbatch.

    Args:
      batch: a tree of arrays. Arrays without dimensions belong to every microbatch.
      dim: the dimension that is cut.

    Returns:
      The same tree of `Given`s.

    Raises:
      UsageError: an array cannot be cut evenly.
    """

    def part(path: Any, leaf: Any) -> Given:
        given = describe(leaf)
        shape, where = given.shape, f"batch{jax.tree_util.keystr(path)}"
        if not shape:
            return given
        if dim >= len(shape):
            raise UsageError(
                f"{where} of shape {list(shape)} has no dimension {dim} to cut into microbatches"
            )
        if shape[dim] % num_microbatches or not shape[dim]:
            raise UsageError(
                f"{where} has {shape[dim]} rows, which cannot be cut evenly into "
                f"{num_microbatches} microbatches",
                hint="take a number of microbatches that divides the rows",
            )
        rows = shape[dim] // num_microbatches
        return replace(given, shape=(*shape[:dim], rows, *shape[dim + 1 :]))

    return jax.tree_util.tree_map_with_path(part, batch)


def divides(sharding: Sharding, shape: Sequence[int]) -> bool:
    """Whether an array of this shape can have this sharding."""
    try:
        sharding.shard_shape(tuple(shape))
    # jax raises these where a dimension is no multiple, or does not exist.
    except ValueError:
        return False
    return True


def bytes_per_device(like: Struct) -> int:
    """Returns the bytes of an array with a sharding on each of its devices."""
    sharding: Any = like.sharding
    return math.prod(sharding.shard_shape(like.shape)) * like.dtype.itemsize


def is_same_layout(some: Sharding, other: Sharding, shape: Sequence[int]) -> bool:
    """Whether two shardings cut arrays of this shape in the same way over the devices of two
    meshes, in their order."""
    indices = [list(one.devices_indices_map(tuple(shape)).values()) for one in (some, other)]
    return indices[0] == indices[1]
