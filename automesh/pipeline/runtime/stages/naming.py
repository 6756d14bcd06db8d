"""Says with the axes of a mesh how an array is split that XLA has chosen a sharding for (jax)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from automesh.pipeline.runtime.split.arguments import is_same_layout


def name_sharding(sharding: Sharding, shape: Sequence[int], mesh: Mesh) -> Sharding:
    """A sharding over the devices of a mesh as a `NamedSharding` on it.

    Args:
      shape: of an array that can have it.

    Returns:
      The same sharding if no axes of the mesh say what it does.
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
    # A dimension without elements is in one part.
    for whole, part in zip(shape, sharding.shard_shape(tuple(shape)), strict=True):
        yield (whole, part) if part else (1, 1)


def _specs(
    parts: Sequence[int], axes: Sequence[str], mesh: Mesh
) -> Iterator[tuple[tuple[str, ...] | None, ...]]:
    """All ways to split dimensions into so many parts by different axes, in every order."""
    if not parts:
        yield ()
        return
    for count in range(len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            if math.prod(mesh.shape[name] for name in chosen) == parts[0]:
                left = [name for name in axes if name not in chosen]
                for others in _specs(parts[1:], left, mesh):
                    yield (chosen or None, *others)
