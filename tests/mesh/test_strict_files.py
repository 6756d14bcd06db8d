"""A mistake in a file is told with its key, however deep it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from automesh.errors import UsageError
from automesh.mesh.strict_files import check_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    size: int
    kind: str = "leaf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    weight: float
    of: Leaf | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    name: str
    points: tuple[Leaf, ...] = ()
    pair: tuple[Other, Leaf] | None = None
    listed: list[Other] | None = None
    named: dict[str, Leaf] | None = None
    either: Annotated[Leaf | Other | None, "one of them"] = None


GOOD = {
    "name": "a",
    "points": [{"size": 1, "kind": "b"}, {"size": 2, "kind": "c"}],
    "pair": [{"weight": 0.5, "of": {"size": 1, "kind": "d"}}, {"size": 3, "kind": "e"}],
    "listed": [{"weight": 0.5, "of": {"size": 1, "kind": "f"}}],
    "named": {"first": {"size": 1, "kind": "g"}},
    "either": {"weight": 0.5, "of": {"size": 1, "kind": "h"}},
}


def keys(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in inner:
        if isinstance(key, str) and path != ("named",):
            yield (*path, key)
        if isinstance(value, dict | list):
            yield from keys(value, (*path, key))


def with_misspelt(path: tuple[str | int, ...]) -> tuple[dict[str, Any], str]:
    tree: Any = copy.deepcopy(GOOD)
    at = tree
    for part in path[:-1]:
        at = at[part]
    wrong = f"{path[-1]}x"
    at[wrong] = at.pop(path[-1])
    return tree, wrong


def test_the_good_tree_is_read() -> None:
    read = check_tree(GOOD, Tree, source=Path("t.toml"))
    assert read.pair is not None and read.pair[1].size == 3


@pytest.mark.parametrize("path", list(keys(GOOD)), ids=lambda path: ".".join(map(str, path)))
def test_a_misspelt_key_is_told_at_any_depth(path: tuple[str | int, ...]) -> None:
    tree, wrong = with_misspelt(path)
    with pytest.raises(UsageError) as caught:
        check_tree(tree, Tree, source=Path("t.toml"))
    assert re.search(rf"`[a-z0-9.\[\]]*\b{wrong}` is not a known key", caught.value.message)
    assert f"`{path[-1]}`" in caught.value.message


def test_a_key_like_no_other_is_told_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="known are size, kind"):
        check_tree({"name": "a", "points": [{"size": 1, "zzzz": 2}]}, Tree, source=Path("t.toml"))
