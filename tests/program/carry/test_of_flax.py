"""Classes of Flax that are read with a function."""

from __future__ import annotations

import types
from typing import Any

import jax
import pytest

from automesh.program.carry.of_flax import nodes_register_later

struct: Any = pytest.importorskip("flax.struct")


def made(module: str) -> Any:
    """Makes a class as pickle does: before it knows its fields."""
    return types.new_class("State", (struct.PyTreeNode,), {}, lambda body: body.update(
        {"__module__": module}
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("module", "is_node"), [("__main__", False), ("not.imported.here", False), ("json", True)]
)
def test_a_class_of_the_script_does_not_register_itself_without_its_fields(
    module: str, is_node: bool
) -> None:
    """Before, it was a node without children, and the script was run for each mesh."""
    with nodes_register_later(True):
        kind = made(module)
    leaves = jax.tree.leaves([object.__new__(kind)])
    assert (len(leaves) == 0) == is_node


def test_afterwards_they_register_themselves_again() -> None:
    with nodes_register_later(True):
        pass
    assert jax.tree.leaves([object.__new__(made("__main__"))]) == []
