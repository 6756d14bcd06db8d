"""Makes the shardings of a tree by the patterns of a rule (jax)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from automesh.errors import UsageError, kind_of
from automesh.mesh.mapping import MappedAxes
from automesh.mesh.rules.shardings import Dims, Shardings, axes_of

_SHOWN = 4


def shardings_of_tree(
    tree: Any,
    shardings: Shardings,
    *,
    mapping: Mapping[str, MappedAxes],
    mesh: Mesh,
    name: str = "",
) -> Any:
    """Makes the sharding of each array of a tree.

    Args:
      tree: of arrays, or of objects with a shape, such as the result of `jax.eval_shape`.
      mapping: of logical axes.
      name: of the tree among the arguments of the step, as patterns begin: `params`; empty to find
        out.

    Raises:
      UsageError: there are no shardings, no pattern matches an array or it does not fit, or several
        arguments of the step have such arrays.
    """
    if not shardings:
        raise UsageError(
            "the rule has no shardings",
            hint="`automesh search train.py --infer` writes them for a script that makes no mesh; "
            "elsewhere the script splits its arrays itself",
        )
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    shapes = [_shape(path, leaf) for path, leaf in leaves]
    paths = [path_in(path) for path, _ in leaves]
    prefix, _ = root_of(paths, shapes, shardings, name=name)
    found = [
        sharding_at(_joined(prefix, path), shape, shardings, mapping=mapping, mesh=mesh)
        for path, shape in zip(paths, shapes, strict=True)
    ]
    return structure.unflatten(found)


def explain_tree(
    tree: Any, shardings: Shardings, *, mapping: Mapping[str, MappedAxes], mesh: Mesh, name: str
) -> str:
    """Writes a line for each array: its path, its pattern, and what splits its dimensions."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    shapes = [_shape(path, leaf) for path, leaf in leaves]
    paths = [path_in(path) for path, _ in leaves]
    prefix, _ = root_of(paths, shapes, shardings, name=name)
    whole = [_joined(prefix, path) for path in paths]
    width = max(map(len, whole), default=0)
    lines: list[str] = []
    for path, shape in zip(whole, shapes, strict=True):
        spec = sharding_at(path, shape, shardings, mapping=mapping, mesh=mesh).spec
        said = ", ".join("+".join(_names(part)) or "-" for part in (*spec, *[None] * len(shape)))
        dims = ", ".join(said.split(", ")[: len(shape)])
        lines.append(f"{path:<{width}}  by `{shardings.first(path)}`: {dims or 'whole'}")
    return "\n".join(lines)


def sharding_at(
    path: str,
    shape: Sequence[int],
    shardings: Shardings,
    *,
    mapping: Mapping[str, MappedAxes],
    mesh: Mesh,
) -> NamedSharding:
    """Makes the sharding of one array.

    Args:
      path: whole, as patterns match it.

    Raises:
      UsageError: no pattern matches it, or it does not fit.
    """
    pattern = shardings.first(path)
    if not pattern:
        raise not_covered({path: len(shape)}, shardings)
    over = _fitting(path, shape, pattern, shardings[pattern], mapping, mesh)
    parts = [axes if len(axes) > 1 else axes[0] if axes else None for axes in over]
    while parts and parts[-1] is None:
        parts.pop()
    return NamedSharding(mesh, PartitionSpec(*parts))


def not_covered(missing: Mapping[str, int], shardings: Shardings) -> UsageError:
    """Makes the error for arrays that no pattern matches.

    Args:
      missing: by path, the number of dimensions.
    """
    paths = list(missing)
    shown = ", ".join(f"`{path}`" for path in paths[:_SHOWN])
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    begin = ", ".join(f"`{root}`" for root in shardings.roots)
    known = f" (there are some for {begin})" if begin else ""
    dims = ", ".join(['""'] * missing[paths[0]])
    return UsageError(
        f"no pattern of the rule's shardings covers {shown}{more}",
        hint=f'add "{paths[0]}" = [{dims}] under [rule.shardings]{known} to leave it whole, '
        "or search the script as it is now",
    )


def root_of(
    paths: Sequence[str], shapes: Sequence[Sequence[int]], shardings: Shardings, *, name: str
) -> tuple[str, Sequence[str]]:
    """Finds the prefix with which patterns match all paths of a tree, and each path's pattern.

    Raises:
      UsageError: no prefix does, or several arguments do whose arrays are split in different ways.
    """
    tried = [name] if name else ["", *shardings.roots]
    covering: dict[str, list[str]] = {}
    fewest: list[str] | None = None
    for prefix in tried:
        by = [shardings.first(_joined(prefix, path)) for path in paths]
        fits = [
            bool(pattern) and len(shardings[pattern]) == len(shape)
            for pattern, shape in zip(by, shapes, strict=True)
        ]
        if all(by) and (all(fits) or name or not prefix):
            covering[prefix] = by
        missing = [path for path, pattern in zip(paths, by, strict=True) if not pattern]
        if fewest is None or len(missing) < len(fewest):
            fewest = missing
        if not prefix and all(by):
            break
    if not covering:
        ranks = dict(zip(paths, map(len, shapes), strict=True))
        raise not_covered({_joined(name, path): ranks[path] for path in fewest or paths}, shardings)
    (first, by), *others = covering.items()
    said = [shardings[pattern] for pattern in by]
    for other, patterns in others:
        if [shardings[pattern] for pattern in patterns] != said:
            raise UsageError(
                f"the tree may be `{first}` or `{other}` of the step, whose arrays are split in "
                "different ways",
                hint=f'say which: config.shardings(tree, name="{first}")',
            )
    return first, by


def path_in(path: Sequence[Any]) -> str:
    """Returns the path of an array in its tree: keys, numbers and attributes, joined by `/`."""
    parts = [_key(entry) for entry in path]
    return "/".join(piece for part in parts for piece in part.split("/") if piece)


def _key(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute)).removeprefix(".")
    return str(entry)


def _joined(prefix: str, path: str) -> str:
    return "/".join(part for part in (prefix, path) if part)


def _names(part: Any) -> tuple[str, ...]:
    return () if part is None else (part,) if isinstance(part, str) else tuple(part)


def _shape(path: Any, leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, (bool, int, float, complex)):
        return ()
    shape = getattr(leaf, "shape", None)
    if shape is None:
        raise UsageError(
            f"`{path_in(path)}` is {kind_of(leaf)}, not an array",
            hint="give a tree of arrays, or what `jax.eval_shape` gives",
        )
    return tuple(shape)


def _fitting(
    path: str,
    shape: Sequence[int],
    pattern: str,
    dims: Dims,
    mapping: Mapping[str, MappedAxes],
    mesh: Mesh,
) -> tuple[tuple[str, ...], ...]:
    if len(dims) != len(shape):
        raise UsageError(
            f"`{path}` has {len(shape)} dimensions, {list(shape)}, and its pattern `{pattern}` "
            f"names {len(dims)}",
            hint="write a pattern of its own before that one, or search the script again",
        )
    over = axes_of(dims, mapping, mesh.axis_names)
    flat = [axis for part in over for axis in part]
    twice = next((axis for axis in flat if flat.count(axis) > 1), "")
    if twice:
        raise UsageError(
            f"`{path}` is split over {twice} twice, by its pattern `{pattern}` = {list(over)}",
            hint="take the axis out of one dimension",
        )
    for place, (size, axes) in enumerate(zip(shape, over, strict=True)):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise UsageError(
                f"dimension {place} of `{path}` is {size}, which the {parts} parts over "
                f"{'*'.join(axes)} do not divide, by its pattern `{pattern}`",
                hint="give it a size that they divide (leave out a last, smaller batch), or take "
                "the axis out of the pattern",
            )
    return over


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec; none if the entry leaves the choice to
    XLA."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
