"""A checked sharding constraint that works with every type of mesh axis (jax)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from automesh.errors import UsageError, WrongType, did_you_mean, kind_of
from automesh.mesh.layout.context import find_mesh, is_staging
from automesh.mesh.layout.place import axes_of, constrain, keep_unconstrained

_LONGEST_FORM = 120  # characters of a tree's form in a message


def with_sharding_constraint(x: Any, shardings: Any, *, mesh: Mesh | None = None) -> Any:
    """Splits arrays over the mesh in force at this point of a program, or of a script.

    As in Loadax, a `PartitionSpec` splits nothing if no mesh is in force or it has one device, so
    that the same model runs on one device; it is still checked. A complete sharding has its own
    devices and always applies. Arrays are resharded over Explicit axes, where jax's own constraint
    would only check; there `PartitionSpec.UNCONSTRAINED` keeps the present split.

    Args:
      x: a tree of arrays, traced or not.
      shardings: `PartitionSpec`s or `jax.sharding.Sharding`s: one for all, or a tree in which each
        leaf applies to the same subtree of `x`. None leaves that subtree as it is.
      mesh: that the specs refer to; default: that of `jax.set_mesh` or of a legacy `with mesh:`.

    Raises:
      UsageError: a spec names an axis that the mesh does not have, one twice, or one that is manual
        inside `shard_map`; has more entries than the array has dimensions; or splits a dimension
        that its axes do not divide. Or the mesh is abstract and the array concrete. It names the
        array.
      WrongType: something in `shardings` that is none of the above, or in `x` that is no array.

    Example:
      >>> from automesh import create_mesh
      >>> mesh = create_mesh((2, 4), ("data", "model"))
      >>> rows = with_sharding_constraint(jax.numpy.ones((4, 8)), PartitionSpec("data"), mesh=mesh)
      >>> rows.addressable_data(0).shape
      (2, 8)
    """
    chosen = find_mesh(mesh)
    try:
        matched = jax.tree_util.tree_map_with_path(_Match, shardings, x, is_leaf=_is_sharding)
    except ValueError as error:
        # jax's messages differ between versions, and some print the arrays.
        raise UsageError(
            f"the tree of shardings does not fit the tree of arrays: {_form(shardings)} against "
            f"{_form(x)}",
            hint="give one sharding for all, or a tree that is the beginning of the arrays' tree",
        ) from error
    return jax.tree.map(lambda match: _constrain(match, chosen), matched)


def _form(tree: Any) -> str:
    """Prints the structure of a tree, with `*` for every leaf: `{'w': *}`."""
    text = str(jax.tree.structure(tree, is_leaf=_is_sharding))
    text = text.removeprefix("PyTreeDef(").removesuffix(")")
    return text if len(text) <= _LONGEST_FORM else f"{text[:_LONGEST_FORM]}..."


@dataclass(frozen=True, slots=True)
class _Match:
    """A leaf of the tree of shardings, and the arrays that it applies to.

    Attributes:
      path: of the leaf, in jax's terms.
    """

    path: tuple[Any, ...]
    sharding: Any
    part: Any


def _constrain(match: _Match, mesh: Mesh | AbstractMesh | None) -> Any:
    sharding = match.sharding
    if sharding is None:
        return match.part
    if not _is_sharding(sharding):
        raise WrongType(
            f"a sharding must be a PartitionSpec or a Sharding, got {kind_of(sharding)}: "
            f"{sharding!r}",
            hint='write for example jax.sharding.PartitionSpec("data")',
        )
    if isinstance(sharding, PartitionSpec):
        _check_axes(sharding, mesh)
    return jax.tree_util.tree_map_with_path(
        lambda rest, leaf: _constrain_array(
            jax.tree_util.keystr((*match.path, *rest)) or "x", sharding, leaf, mesh
        ),
        match.part,
    )


def _constrain_array(
    where: str, sharding: PartitionSpec | Sharding, array: Any, mesh: Mesh | AbstractMesh | None
) -> Any:
    _check_array(where, array)
    if isinstance(sharding, PartitionSpec):
        _check_rank(where, sharding, jax.numpy.shape(array))
        if mesh is None or mesh.size == 1:
            return array
        if AxisType.Auto not in mesh.axis_types:  # jax refuses unconstrained dimensions here.
            sharding = keep_unconstrained(array, sharding, mesh)
        sharding = NamedSharding(mesh, sharding)
    if not isinstance(sharding, NamedSharding):
        return jax.lax.with_sharding_constraint(array, sharding)
    _check_rank(where, sharding.spec, jax.numpy.shape(array))
    _check_sizes(where, sharding, jax.numpy.shape(array))
    if isinstance(sharding.mesh, AbstractMesh) and not is_staging():
        raise UsageError(
            f"array `{where}` cannot be put on an abstract mesh, which has no devices",
            hint="enter `jax.set_mesh(mesh)`, or pass `mesh=`",
        )
    return constrain(array, sharding, path=where)


def _is_sharding(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec | Sharding)


def _check_array(where: str, leaf: Any) -> None:
    is_array = isinstance(leaf, jax.Array) or hasattr(leaf, "__jax_array__")
    if not is_array and np.asarray(leaf).dtype.kind in "OSUMm":
        raise WrongType(
            f"array `{where}` is {kind_of(leaf)}, not an array of numbers",
            hint="give a tree of shardings with None for what is no array",
        )


def _check_axes(spec: PartitionSpec, mesh: Mesh | AbstractMesh | None) -> None:
    used = [name for entry in spec for name in axes_of(entry)]
    kinds: dict[str, AxisType] = (
        {} if mesh is None else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    )
    for name in used:
        if mesh is not None and name not in kinds:
            known = did_you_mean(name, kinds) or f"; it has {', '.join(kinds)}"
            raise UsageError(
                f"`{spec}` names `{name}`, which is not an axis of the mesh{known}",
                hint="name axes of the mesh, or None for a dimension that is not split",
            )
        if kinds.get(name) == AxisType.Manual:
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


def _check_rank(where: str, spec: PartitionSpec, shape: tuple[int, ...]) -> None:
    if len(spec) > len(shape):
        raise UsageError(
            f"array `{where}` of shape {shape} has {len(shape)} dimensions, but `{spec}` "
            f"has {len(spec)} entries",
            hint="give an entry for each dimension at most",
        )


def _check_sizes(where: str, sharding: NamedSharding, shape: tuple[int, ...]) -> None:
    for dimension, (size, entry) in enumerate(zip(shape, sharding.spec, strict=False)):
        ways = math.prod(sharding.mesh.shape[name] for name in axes_of(entry))
        if size % ways:
            raise UsageError(
                f"dimension {dimension} of array `{where}` has size {size}, which the {ways} "
                f"devices along {', '.join(axes_of(entry))} do not divide",
                hint="pad the array, or split another dimension",
            )
