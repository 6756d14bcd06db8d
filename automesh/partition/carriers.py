"""Finds arrays with logical names in Haliax, Flax, dataclasses and plain trees.

Arrays of plain trees get their names by their paths, with regex rules as in EasyLM and EasyDeL.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, keystr

from automesh.errors import UsageError, WrongType, kind_of
from automesh.mesh.layout.place import array_label
from automesh.partition.specs import DimName, NamedShape

Names = Sequence[str | tuple[str, ...] | None] | PartitionSpec
"""Names of dimensions; a PartitionSpec may leave out the last ones."""
_EXAMPLE = "write for example [(r'attn/.*kernel', ('embed', 'heads'))]"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLeaf:
    """One array of a tree, with the object that carries its names.

    Attributes:
      path: from the root, joined by `/`.
      names: from its carrier or the user's tree of names; None if it has none.
      array: an array, tracer or ShapeDtypeStruct; any object in a tree without shapes yet.
      rebuild: puts another array into the carrier.
    """

    path: str
    names: tuple[DimName, ...] | None
    array: Any
    rebuild: Callable[[Any], Any]

    @property
    def is_array(self) -> bool:
        return is_array(self.array)

    def named_shape(self) -> NamedShape:
        """Returns its names and sizes.

        Raises:
          UsageError: there are more names than dimensions, or fewer.
        """
        shape = tuple(self.array.shape)
        names = self.names or ()
        named = NamedShape(path=self.path, names=names, shape=shape)
        if len(names) != len(shape):
            raise UsageError(
                f"{named.label} has the {len(names)} names {names} for its {len(shape)} "
                f"dimensions {shape}",
                hint="give one name for each dimension, None for one that has no name",
            )
        return named


def is_array(value: object) -> bool:
    """Whether a value has a shape and a dtype: jax and NumPy arrays, tracers, ShapeDtypeStructs."""
    # The scalar types (classes) of NumPy have both attributes too, but not as values.
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def map_leaves(tree: Any, visit: Callable[[NamedLeaf], Any], *, names: Any = None) -> Any:
    """Replaces every leaf of a tree by what `visit` returns.

    A leaf is a Haliax NamedArray, a Flax `Partitioned` or nnx `Variable`, or a leaf in jax's sense.
    A shared nnx Variable is visited once and stays shared.

    Args:
      names: a tree of the same structure with a tuple of names, a PartitionSpec of names or None
        for every leaf; has priority over the names that the leaves carry.

    Raises:
      UsageError: `names` has another structure.
      WrongType: a leaf with names is no array, or a dataclass with names is no pytree.
    """
    return _map(tree, _Walk(visit=visit, shared={}), (), names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    visit: Callable[[NamedLeaf], Any]
    shared: dict[int, Any]


def _map(tree: Any, walk: _Walk, prefix: tuple[Any, ...], names: Any) -> Any:
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
    given = _names_at_leaves(names, structure, len(found))
    return structure.unflatten(
        _map_leaf(node, walk, (*prefix, *path), named)
        for (path, node), named in zip(found, given, strict=True)
    )


def _map_leaf(node: Any, walk: _Walk, path: tuple[Any, ...], names: Any) -> Any:
    if fields := _fields_with_names(node):
        return _map_fields(node, walk, path, names, fields)
    if id(node) in walk.shared:
        return walk.shared[id(node)]
    text = keystr(path, simple=True, separator="/")
    _check_registered(node, text)
    own, array, rebuild = _open_leaf(node)
    wanted = own if names is None else _read_names(names, array, text)
    if wanted and own is None and not is_array(array):
        raise WrongType(
            f"`names` names dimensions of {array_label(text)}, which is {kind_of(array)}",
            hint="make it an array, or give None for it",
        )
    result = walk.visit(NamedLeaf(path=text, names=wanted, array=array, rebuild=rebuild))
    if _is_variable(node):
        walk.shared[id(node)] = result
    return result


def _map_fields(
    node: Any, walk: _Walk, path: tuple[Any, ...], names: Any, fields: Mapping[str, Any]
) -> Any:
    """Maps a dataclass whose fields state the names of their arrays (Haliax: `hax.field`)."""
    found, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda inner: inner is not node
    )
    given = _names_at_leaves(names, structure, len(found))
    children: list[Any] = []
    for (key, child), named in zip(found, given, strict=True):
        field = key[0].name if key and isinstance(key[0], GetAttrKey) else None
        if named is None and is_array(child):
            named = fields.get(str(field))
        children.append(_map(child, walk, (*path, *key), named))
    return structure.unflatten(children)


def _names_at_leaves(names: Any, structure: Any, count: int) -> Sequence[Any]:
    if names is None:
        return [None] * count
    try:
        return structure.flatten_up_to(names)
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"`names` must have the structure of the tree: {str(error).splitlines()[0]}",
            hint="make it with `names_by_path`, or give a tuple of names for every array",
        ) from error


def _read_names(names: Any, array: Any, path: str) -> tuple[DimName, ...]:
    label = array_label(path)
    if not isinstance(names, tuple | list | PartitionSpec):
        raise WrongType(
            f"the names of {label} must be a tuple, a PartitionSpec or None, got {names!r}",
            hint="write for example ('embed', 'mlp'), with None for a dimension without a name",
        )
    read = tuple(dim_name(name, label) for name in cast("Sequence[Any]", names))
    if isinstance(names, PartitionSpec) and is_array(array):
        # As in jax: dimensions that are not mentioned are not split; a scalar has none.
        read += (None,) * (len(array.shape) - len(read))
        return read if array.shape else ()
    return read


def dim_name(name: Any, label: str) -> DimName:
    """Checks the name of one dimension.

    Args:
      label: of the array, for the error.

    Raises:
      WrongType: it is neither a string, nor a tuple of strings, nor None.
    """
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, tuple) and all(isinstance(one, str) for one in name):
        return cast("tuple[str, ...]", name)
    raise WrongType(
        f"the name of a dimension of {label} must be a string or None, got {name!r}",
        hint="write for example ('embed', 'mlp'), with None for a dimension without a name",
    )


def _is_leaf(node: Any) -> bool:
    return (
        _is_haliax(node) or _is_boxed(node) or _is_variable(node) or bool(_fields_with_names(node))
    )


def _open_leaf(node: Any) -> tuple[tuple[DimName, ...] | None, Any, Callable[[Any], Any]]:
    """Returns the names of a leaf, its array, and a function that replaces the array."""
    if _is_haliax(node):
        names = tuple(str(axis.name) for axis in node.axes)
        return names, node.array, lambda array: type(node)(array, node.axes)
    if _is_boxed(node):
        return _flax_names(node.names, node.value), node.value, node.replace_boxed
    if _is_variable(node):
        value = node.get_raw_value()
        names = node.get_metadata("out_sharding", None)
        return _flax_names(names, value), value, node.replace
    return None, node, lambda array: array


def _flax_names(names: Any, array: Any) -> tuple[DimName, ...] | None:
    # Flax also takes a whole NamedSharding there, which has no logical names.
    if not isinstance(names, tuple | list | PartitionSpec):
        return None
    return _read_names(PartitionSpec(*cast("Sequence[Any]", names)), array, "")


def _is_haliax(node: Any) -> bool:
    return _is_instance(node, "haliax", "NamedArray")


def _is_boxed(node: Any) -> bool:
    return _is_instance(node, "flax.core.meta", "Partitioned")


def _is_variable(node: Any) -> bool:
    return _is_instance(node, "flax.nnx", "Variable")


def _is_instance(node: Any, module: str, name: str) -> bool:
    # If the library is not loaded, no object of it can be here; it is not imported for this.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(node, kind)


def _check_registered(node: Any, path: str) -> None:
    """Checks that the arrays of a leaf can be reached.

    Raises:
      WrongType: a dataclass with names for its arrays that is no pytree.
    """
    for name in _metadata_names(node):
        if is_array(getattr(node, name, None)):
            where = f" at `{path}`" if path else ""
            raise WrongType(
                f"{kind_of(node)}{where} has names for its field `{name}`, "
                "and is not registered as a pytree",
                hint="decorate its class with `jax.tree_util.register_dataclass`",
            )


def _fields_with_names(node: Any) -> dict[str, Any]:
    """Maps fields to names, for an instance of a dataclass that is a pytree."""
    named = _metadata_names(node)
    return {} if not named or jax.tree_util.all_leaves([node]) else named


def _metadata_names(node: Any) -> dict[str, Any]:
    """Maps fields to names, for an instance of any dataclass."""
    if isinstance(node, type) or not dataclasses.is_dataclass(node):
        return {}
    return {
        field.name: field.metadata["axis_names"]
        for field in dataclasses.fields(node)
        if field.metadata.get("axis_names") is not None
    }


def names_by_path(rules: Sequence[tuple[str, Names]], tree: Any) -> Any:
    """Makes logical names for the arrays of a plain tree, from rules for their paths.

    The result is the argument `names` of `shard`, `pspec_for` and `infer_resource_partitions`.
    Rules with mesh axes as names need the mapping `{axis: axis for axis in mesh.axis_names}`.

    Example:
      >>> import numpy as np
      >>> from automesh.partition import names_by_path
      >>> rules = [(r"wte/embedding", ("vocab", "embed")), (r".*", (None,))]
      >>> names_by_path(rules, {"wte": {"embedding": np.ones((8, 4))}, "bias": np.ones(4)})
      {'bias': (None,), 'wte': {'embedding': ('vocab', 'embed')}}

    Args:
      rules: a regex that is searched in the path (`/` between its parts, as in
        `layers/0/attn/kernel`), and the names of the dimensions. The first that is found wins.
      tree: arrays or ShapeDtypeStructs; scalars need no rule.

    Raises:
      UsageError: no rule is found in a path, a regex is malformed, or the names of an array are
        more or fewer than its dimensions.
      WrongType: `rules` is no list, or a rule no pair of a regex and names.
    """
    if not isinstance(cast("object", rules), tuple | list):
        raise WrongType(
            f"the rules must be a list of pairs, got {kind_of(rules)}: {rules!r}", hint=_EXAMPLE
        )
    compiled = [_compiled(rule) for rule in rules]

    def names_of(leaf: NamedLeaf) -> Any:
        if not leaf.is_array:
            return None
        if not leaf.array.shape:
            return ()
        for pattern, names in compiled:
            if pattern.search(leaf.path):
                return _fitting(names, leaf)
        raise UsageError(
            f"no rule names the dimensions of array `{leaf.path}` of shape {leaf.array.shape}",
            hint="add a rule for it; ('.*', PartitionSpec()) at the end names nothing else",
        )

    return map_leaves(tree, names_of)


def _compiled(rule: Any) -> tuple[re.Pattern[str], Any]:
    pair = isinstance(rule, tuple | list) and len(rule) == 2  # pyright: ignore[reportUnknownArgumentType]
    if not pair or not isinstance(rule[0], str) or isinstance(rule[1], str):
        raise WrongType(
            f"a rule must be a pair of a regex and the names of the dimensions, got {rule!r}",
            hint=_EXAMPLE,
        )
    if not isinstance(rule[1], tuple | list | PartitionSpec):
        raise WrongType(
            f"the names in rule `{rule[0]}` must be a tuple or a PartitionSpec, "
            f"got {kind_of(rule[1])}",
            hint=_EXAMPLE,
        )
    for name in rule[1]:
        dim_name(name, f"rule `{rule[0]}`")
    try:
        return re.compile(rule[0]), rule[1]
    except re.error as error:
        raise UsageError(f"`{rule[0]}` is not a regex: {error}", hint=_EXAMPLE) from None


def _fitting(names: Any, leaf: NamedLeaf) -> Any:
    read = NamedLeaf(path=leaf.path, names=tuple(names), array=leaf.array, rebuild=leaf.rebuild)
    if isinstance(names, PartitionSpec) and len(names) <= len(leaf.array.shape):
        return names
    read.named_shape()
    return tuple(names)
