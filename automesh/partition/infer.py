"""The specs and shardings that the arrays of a tree should have."""

from __future__ import annotations

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from automesh.errors import UsageError
from automesh.partition.carriers import Leaf, map_leaves
from automesh.partition.context import require_mesh
from automesh.partition.mapping import mapping_or_current
from automesh.partition.nouns import MeshLike, ResourceMapping
from automesh.partition.specs import spec_of


def pspec_for(
    tree: Any,
    resource_mapping: ResourceMapping | None = None,
    preserve_existing_shardings: bool = True,
    *,
    names: Any = None,
) -> Any:
    """The tree with a PartitionSpec in place of every array.

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
    """The tree with a NamedSharding in place of every array, for `jit`'s shardings.

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

    def sharding(leaf: Leaf) -> Any:
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
    leaf: Leaf, mapping: ResourceMapping, mesh: MeshLike | None, *, preserve: bool
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
    # An array on one device has not been placed by anybody.
    if preserve and current is not None and not isinstance(current, SingleDeviceSharding):
        return None
    return PartitionSpec(None)
