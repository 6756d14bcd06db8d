"""Trees of a script's own classes keep the names of their leaves."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from automesh.program.carry.names import paths_of, tree_of


class State(NamedTuple):
    mu: Any
    nu: Any


class Layer:
    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight, self.bias = weight, bias


jax.tree_util.register_dataclass(Layer, ["weight", "bias"], [])

names = st.text("ab_1", min_size=1, max_size=3)
trees: Any = st.recursive(
    st.integers(0, 9) | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(names, inner, max_size=3)
        | st.dictionaries(st.integers(0, 20), inner, max_size=3)
        | st.builds(State, inner, inner)
        | st.builds(Layer, inner, inner)
    ),
    max_leaves=12,
)


def shown(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


@given(trees)
def test_a_tree_keeps_the_ways_to_its_leaves(tree: Any) -> None:
    leaves = jax.tree.leaves(tree)
    again = tree_of(paths_of(tree), leaves)
    assert jax.tree.leaves(again) == leaves
    assert shown(again) == shown(tree)
    assert paths_of(again) == paths_of(tree)
    # As with the class of the script, what is made of a part is as large as the part.
    doubled = jax.tree.map(lambda leaf: 2 * leaf, again)
    assert jax.tree.leaves(doubled) == [2 * leaf for leaf in leaves]


def test_a_leaf_is_itself_and_a_tree_without_leaves_is_none() -> None:
    array = np.ones(3)
    assert tree_of(paths_of(array), [array]) is array
    assert tree_of(paths_of({"a": ()}), []) is None


def test_trees_can_be_compared_and_traced() -> None:
    tree = {"layers": [Layer(np.ones(2), np.ones(3))], "step": 1}
    one = tree_of(paths_of(tree), jax.tree.leaves(tree))
    other = tree_of(paths_of(tree), jax.tree.leaves(tree))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert hash(jax.tree.structure(one)) == hash(jax.tree.structure(other))
    given = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree))(one)
    assert jax.tree.structure(given) == jax.tree.structure(one)
