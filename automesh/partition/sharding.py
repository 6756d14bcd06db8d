"""Computes the shardings of the arrays of a tree; `shard` applies them."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from automesh.errors import UsageError
from automesh.mesh.layout.context import find_mesh, is_tracing
from automesh.mesh.layout.place import place
from automesh.partition.carriers import NamedLeaf, map_leaves
from automesh.partition.mapping import (
    MESH_HINT,
    current_thread_local_mapping,
    mapping_or_current,
    require_mesh,
)
from automesh.partition.nouns import MeshLike, ResourceMapping
from automesh.partition.specs import spec_of

T = TypeVar("T")
_NAMES = "pass `names=`, or keep the arrays in what carries names (Haliax, Flax, `axis_names`)"
_MAPPING_HINT = "pass `mapping=`, or enter `axis_mapping({...})`"


def shard(
    x: T,
    mapping: ResourceMapping | None = None,
    mesh: MeshLike | None = None,
    *,
    names: Any = None,
    strict: bool = False,
    best_effort: bool = False,
) -> T:
    """Splits every array that has logical names over the mesh; other arrays stay unchanged.

    Works in the same way inside and outside `jit`, on Auto and Explicit mesh axes. A
    ShapeDtypeStruct gets the sharding as its attribute.

    Example:
      >>> import jax
      >>> from automesh.partition import shard
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
      >>> w = shard(jax.numpy.ones((8, 16)), {"embed": "data"}, mesh, names=("embed", "mlp"))
      >>> w.sharding.shard_shape(w.shape)
      (2, 16)

    Args:
      x: a tree. Names come with Haliax NamedArrays, Flax variables and dataclass fields with the
        metadata `axis_names`, or from `names`.
      mapping: logical axis -> mesh axes; default: that of the context. Names that it leaves out are
        not split: {} replicates.
      mesh: default: that of the context.
      names: for plain arrays: a tree like `x` with a tuple of names (or a PartitionSpec of them)
        for every array, None for one that stays unchanged. `names_by_path` makes one.
      strict: without a mapping or a mesh, or where nothing in the tree has names, raises; otherwise
        the tree is returned as it is, without a mapping or a mesh with a RuntimeWarning (unless the
        mapping is missing inside `jit`).
      best_effort: a dimension that its mesh axes do not divide is split over the first of them that
        do, instead of being an error.

    Raises:
      IllegalMapping: mesh axes do not divide their dimension, or one splits two dimensions.
      UnknownMeshAxis: the mapping names an axis that the mesh does not have.
      UsageError: names and dimensions differ in number; or, if strict, nothing can be split.
      WrongType: the mapping or the mesh is none, or a dataclass with names is no pytree.
    """
    found = mapping_or_current(mapping)
    if found is None:
        return _unsharded(
            x, "no axis mapping found", _MAPPING_HINT, strict=strict, silent=is_tracing()
        )
    here = find_mesh(mesh)
    if here is None:
        return _unsharded(x, "no mesh found", MESH_HINT, strict=strict, silent=False)

    leaves: list[NamedLeaf] = []

    def split(leaf: NamedLeaf) -> Any:
        leaves.append(leaf)
        # A filtered tree has None, or a placeholder, where an array was.
        if leaf.names is None or not leaf.is_array:
            return leaf.rebuild(leaf.array)
        spec = spec_of(leaf.named_shape(), found, mesh=here, best_effort=best_effort)
        return leaf.rebuild(place(leaf.array, NamedSharding(here, spec), path=leaf.path))

    result = map_leaves(x, split, names=names)
    if strict and leaves and all(leaf.names is None for leaf in leaves):
        raise UsageError("nothing in the tree has names, so nothing can be sharded", hint=_NAMES)
    return result


def auto_sharded(x: T, mesh: MeshLike | None = None) -> T:
    """Applies `shard` with the mapping of the context; without one, returns the tree, no warning.

    Example:
      >>> from automesh.partition import auto_sharded
      >>> auto_sharded({"w": 1.0})
      {'w': 1.0}

    Raises:
      IllegalMapping: see `shard`.
    """
    mapping = current_thread_local_mapping()
    return x if mapping is None else shard(x, mapping, mesh)


def shard_with_axis_mapping(x: T, mapping: ResourceMapping, mesh: MeshLike | None = None) -> T:
    """Does what `shard` does, under an older name and with the mapping required.

    Example:
      >>> import jax
      >>> from automesh.partition import shard_with_axis_mapping
      >>> mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
      >>> shard_with_axis_mapping({"plain": 1.0}, {"batch": "data"}, mesh)
      {'plain': 1.0}

    Raises:
      IllegalMapping: see `shard`.
    """
    return shard(x, mapping, mesh)


def _unsharded(x: T, what: str, hint: str, *, strict: bool, silent: bool) -> T:
    if strict:
        raise UsageError(f"{what}, so nothing can be sharded", hint=hint)
    if not silent:
        warnings.warn(f"{what}: not sharding ({hint})", RuntimeWarning, stacklevel=3)
    return x


def pspec_for(
    tree: Any,
    resource_mapping: ResourceMapping | None = None,
    preserve_existing_shardings: bool = True,
    *,
    names: Any = None,
) -> Any:
    """Replaces every array of a tree by its PartitionSpec.

    Example:
      >>> import jax
      >>> from automesh.partition import pspec_for
      >>> w = jax.ShapeDtypeStruct((8, 16), jax.numpy.float32)
      >>> pspec_for({"w": w}, {"embed": "fsdp"}, names={"w": ("embed", "mlp")})["w"][0]
      'fsdp'

    Args:
      tree: arrays and ShapeDtypeStructs; where their names come from, see `shard`.
      resource_mapping: logical axis -> mesh axes; default: that of the context.
      preserve_existing_shardings: None instead of a spec for an array that has a sharding.
      names: for plain arrays, see `shard`.

    Returns:
      Plain arrays, scalars included, are replicated; what is no array becomes None.

    Raises:
      UsageError: there is no mapping, or names and dimensions differ in number.
      IllegalMapping: a mesh axis splits two dimensions of an array.
    """
    mapping = _require_mapping(resource_mapping)
    return map_leaves(
        tree,
        lambda leaf: _spec(leaf, mapping, None, preserve=preserve_existing_shardings),
        names=names,
    )


def infer_resource_partitions(
    tree: Any,
    resource_mapping: ResourceMapping | None = None,
    preserve_existing_shardings: bool = True,
    mesh: MeshLike | None = None,
    *,
    names: Any = None,
) -> Any:
    """Replaces every array of a tree by its NamedSharding, for `jit`'s shardings.

    Example:
      >>> import jax
      >>> from automesh.partition import infer_resource_partitions
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
      >>> w = jax.ShapeDtypeStruct((8, 16), jax.numpy.float32)
      >>> found = infer_resource_partitions(w, {"embed": "data"}, mesh=mesh, names=("embed", None))
      >>> tuple(found.spec)
      ('data', None)

    Args:
      tree: arrays and ShapeDtypeStructs; where their names come from, see `shard`.
      resource_mapping: logical axis -> mesh axes; default: that of the context.
      preserve_existing_shardings: an array that has a sharding keeps it.
      mesh: default: that of the context.
      names: for plain arrays, see `shard`.

    Returns:
      Plain arrays, scalars included, are replicated; what is no array becomes None.

    Raises:
      UsageError: there is no mapping or no mesh, or names and dimensions differ in number.
      IllegalMapping: mesh axes do not divide their dimension, or one splits two dimensions.
      UnknownMeshAxis: the mapping names an axis that the mesh does not have.
    """
    mapping, here = _require_mapping(resource_mapping), require_mesh(mesh)

    def sharding(leaf: NamedLeaf) -> Any:
        spec = _spec(leaf, mapping, here, preserve=preserve_existing_shardings)
        if spec is None:
            return getattr(leaf.array, "sharding", None) if leaf.is_array else None
        return NamedSharding(here, spec)

    return map_leaves(tree, sharding, names=names)


def _require_mapping(mapping: ResourceMapping | None) -> ResourceMapping:
    found = mapping_or_current(mapping)
    if found is None:
        raise UsageError(
            "no axis mapping found: none was given, and no context sets one",
            hint="pass `resource_mapping=`, or enter `axis_mapping({...})`",
        )
    return found


def _spec(
    leaf: NamedLeaf, mapping: ResourceMapping, mesh: MeshLike | None, *, preserve: bool
) -> PartitionSpec | None:
    if not leaf.is_array:
        is_scalar = isinstance(leaf.array, bool | int | float | complex)
        return PartitionSpec() if is_scalar and leaf.names is None else None
    current = getattr(leaf.array, "sharding", None)
    if leaf.names is not None:
        kept = preserve and current is not None
        return None if kept else spec_of(leaf.named_shape(), mapping, mesh=mesh)
    if not leaf.array.shape:
        return PartitionSpec()
    # Nobody has placed an array on one device.
    if preserve and current is not None and not isinstance(current, SingleDeviceSharding):
        return None
    return PartitionSpec(None)
