"""A sharding constraint that is checked and works with every kind of axis (jax)."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of
from automesh.mesh.context import find_mesh
from automesh.mesh.placing import constrain


def with_sharding_constraint(x: Any, shardings: Any, *, mesh: Mesh | None = None) -> Any:
    """Splits arrays over the mesh in force at this point of a program, or of a script.

    As in Loadax, nothing happens where no mesh is in force or it has one device, so that the same
    model runs on one device. Arrays are resharded over Explicit axes, where jax's own constraint
    would only check.

    Args:
      x: a tree of arrays, traced or not.
      shardings: `PartitionSpec`s or `jax.sharding.Sharding`s: one for all, or a tree whose leaves
        are each for the part of `x` in its place. None leaves that part as it is.
      mesh: that the specs refer to; default: that of `jax.set_mesh` or of a legacy `with mesh:`.

    Raises:
      UsageError: a spec names an axis that the mesh does not have, one twice, or one that is
        manual inside `shard_map`; has more entries than the array has dimensions; or splits a
        dimension that its axes do not divide. It names the array.
      WrongType: something in `shardings` that is none of the above.

    Example:
      >>> from automesh import create_mesh
      >>> mesh = create_mesh((2, 4), ("data", "model"))
      >>> rows = with_sharding_constraint(jax.numpy.ones((4, 8)), PartitionSpec("data"), mesh=mesh)
      >>> rows.addressable_data(0).shape
      (2, 8)
    """
    chosen = find_mesh(mesh)
    if chosen is None or chosen.size == 1:
        return x
    try:
        return jax.tree_util.tree_map_with_path(
            lambda path, sharding, part: _constrain(path, sharding, part, chosen),
            shardings,
            x,
            is_leaf=_is_sharding,
        )
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(
            f"the tree of shardings does not fit the tree of arrays: {str(error).splitlines()[0]}",
            hint="give one sharding for all, or a tree that is the beginning of the arrays' tree",
        ) from error


def _constrain(path: Any, sharding: Any, part: Any, mesh: Mesh | AbstractMesh) -> Any:
    if sharding is None:
        return part
    if not _is_sharding(sharding):
        raise WrongType(
            f"a sharding must be a PartitionSpec or a Sharding, got {kind_of(sharding)}: "
            f"{sharding!r}",
            hint='write for example jax.sharding.PartitionSpec("data")',
        )
    if isinstance(sharding, PartitionSpec):
        _check_axes(sharding, mesh)
        sharding = NamedSharding(mesh, sharding)
    return jax.tree_util.tree_map_with_path(
        lambda rest, leaf: _constrain_array((*path, *rest), sharding, leaf), part
    )


def _constrain_array(path: Any, sharding: Sharding, array: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return jax.lax.with_sharding_constraint(array, sharding)
    where = jax.tree_util.keystr(path) or "x"
    _check_sizes(where, sharding, jax.numpy.shape(array))
    return constrain(array, sharding, path=where)


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | Sharding)


def _check_axes(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> None:
    used = [name for entry in spec for name in _names(entry)]
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name in used:
        if name not in mesh.axis_names:
            known = did_you_mean(name, mesh.axis_names) or f"; it has {', '.join(mesh.axis_names)}"
            raise UsageError(
                f"`{spec}` names `{name}`, which is not an axis of the mesh{known}",
                hint="name axes of the mesh, or None for a dimension that is not split",
            )
        if kinds[name] == AxisType.Manual:
            raise UsageError(
                f"`{spec}` names `{name}`, which is manual here: inside `shard_map` each device "
                "has its own part already",
                hint="name only axes that `shard_map` leaves to the compiler",
            )
        if used.count(name) > 1:
            raise UsageError(
                f"`{spec}` uses the mesh axis `{name}` {used.count(name)} times",
                hint="an axis can split one dimension of an array only",
            )


def _check_sizes(where: str, sharding: NamedSharding, shape: tuple[int, ...]) -> None:
    if len(sharding.spec) > len(shape):
        raise UsageError(
            f"array `{where}` of shape {shape} has {len(shape)} dimensions, but `{sharding.spec}` "
            f"has {len(sharding.spec)} entries",
            hint="give an entry for each dimension at most",
        )
    for dimension, (size, entry) in enumerate(zip(shape, sharding.spec, strict=False)):
        ways = math.prod(sharding.mesh.shape[name] for name in _names(entry))
        if size % ways:
            raise UsageError(
                f"dimension {dimension} of array `{where}` has size {size}, which the {ways} "
                f"devices along {', '.join(_names(entry))} do not divide",
                hint="pad the array, or split another dimension",
            )


def _names(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
