"""Stores trees of arguments with classes of the script by the paths of their leaves (jax)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

Key = tuple[str, str | int]
Path = tuple[Key, ...]


@dataclass(slots=True)
class Node:
    """A node that replaces any node class of the script: its children with their keys."""

    keys: tuple[Key, ...]
    children: tuple[Any, ...]


def _flatten(node: Node) -> tuple[tuple[tuple[Any, Any], ...], tuple[Key, ...]]:
    pairs = zip(node.keys, node.children, strict=True)
    return tuple((_key(key), child) for key, child in pairs), node.keys


def _unflatten(keys: tuple[Key, ...], children: Iterable[Any]) -> Node:
    return Node(keys, tuple(children))


jax.tree_util.register_pytree_with_keys(
    Node, _flatten, _unflatten, lambda node: (node.children, node.keys)
)


def _key(key: Key) -> Any:
    kind, name = key
    if kind == "attribute":
        return GetAttrKey(str(name))
    if kind == "item":
        return DictKey(name)
    return SequenceKey(int(name)) if kind == "place" else FlattenedIndexKey(int(name))


def paths_of(tree: Any) -> tuple[Path, ...]:
    """Returns the path of each leaf of a tree, in order."""
    return tuple(tuple(map(_stored, path)) for path, _ in jax.tree_util.tree_leaves_with_path(tree))


def _stored(key: Any) -> Key:
    match key:
        case GetAttrKey():
            return "attribute", key.name
        case DictKey():
            return "item", _plain(key.key)
        case SequenceKey():
            return "place", key.idx
        case FlattenedIndexKey():
            return "index", key.key
        case _:  # A class with keys of its own.
            return "attribute", str(key).lstrip(".")


def _plain(key: Any) -> str | int:
    """Returns a key of a dictionary, without the class of an enumeration, which is the script's
    alone."""
    if isinstance(key, str):
        return str.__str__(key)
    is_number = isinstance(key, int) and not isinstance(key, bool)
    return int(key) if is_number else str(key)


def tree_of(paths: Sequence[Path], leaves: Sequence[Any]) -> Any:
    """Makes a tree from the paths of its leaves and the leaves, both in order.

    A tree without leaves is None; one that is a leaf is that leaf.
    """
    if not paths:
        return None
    if len(paths) == 1 and not paths[0]:
        return leaves[0]
    keys: list[Key] = []
    children: list[Any] = []
    first = 0
    while first < len(paths):
        key = paths[first][0]
        last = first
        while last < len(paths) and paths[last][0] == key:
            last += 1
        keys.append(key)
        part = [path[1:] for path in paths[first:last]]
        children.append(tree_of(part, leaves[first:last]))
        first = last
    return Node(tuple(keys), tuple(children))
