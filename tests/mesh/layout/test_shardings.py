"""`MeshConfig.shardings`: a tree by the patterns of a rule, and what is refused with a sentence."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from automesh import MeshConfig
from automesh.errors import UsageError

DEVICES = jax.devices()[:8]


def array(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


CONFIG = MeshConfig(
    mesh_shape=(-1, 4),
    mesh_axis_names=("dp", "tp"),
    mapping={"batch": "dp", "mlp": "tp"},
    sharding_patterns={
        "params/**/up": ["embed", ["mlp", "dp"]],
        "opt/**/up": ["embed", "mlp"],
        "**/bias": [""],
        "x": ["batch", ""],
    },
)
MESH = CONFIG.create_device_mesh(DEVICES)


def test_a_tree_of_several_arguments_by_their_names() -> None:
    tree = {"params": {"a": {"up": array(8, 16), "bias": array(3)}}, "x": array(4, 8)}
    found = CONFIG.shardings(tree, mesh=MESH)
    assert found["params"]["a"]["up"].spec == P(None, ("tp", "dp"))
    assert found["params"]["a"]["bias"].spec == P()
    assert found["x"].spec == P("dp")
    assert found["x"].mesh.shape == {"dp": 2, "tp": 4}


def test_one_argument_is_found_by_what_its_arrays_are_called() -> None:
    found = CONFIG.shardings({"a": {"up": array(8, 16)}}, name="opt", mesh=MESH)
    assert found["a"]["up"].spec == P(None, "tp")
    assert CONFIG.shardings([{"bias": array(3)}], mesh=MESH)[0]["bias"].spec == P()


def test_which_pattern_took_what_is_told() -> None:
    tree = {"params": {"a": {"up": array(8, 16), "bias": array(3)}}, "x": array(4, 8)}
    assert CONFIG.explain_shardings(tree, mesh=MESH).splitlines() == [
        "params/a/bias  by `**/bias`: -",
        "params/a/up    by `params/**/up`: -, tp+dp",
        "x              by `x`: dp, -",
    ]


@pytest.mark.parametrize(
    ("tree", "name", "said"),
    [
        ({"a": {"up": array(8, 16)}}, "", "may be `params` or `opt` of the step"),
        ({"a": {"down": array(8, 16)}}, "", "no pattern of the rule's shardings covers `a/down`"),
        ({"x": array(4, 8, 2)}, "", "has 3 dimensions, .4, 8, 2., and its pattern `x` names 2"),
        (
            {"x": array(3, 8)},
            "",
            "dimension 0 of `x` is 3, which the 2 parts over dp do not divide",
        ),
        ({"x": "text"}, "", "`x` is a str, not an array"),
    ],
)
def test_what_does_not_fit_is_refused(tree: Any, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        CONFIG.shardings(tree, name=name, mesh=MESH)


def test_an_axis_twice_on_an_array_is_refused() -> None:
    config = MeshConfig(
        mesh_shape=(-1,), mesh_axis_names=("dp",), sharding_patterns={"w": ["dp", "dp"]}
    )
    with pytest.raises(UsageError, match="`w` is split over dp twice"):
        config.shardings({"w": array(8, 8)})


def test_a_rule_without_shardings_says_where_they_come_from() -> None:
    config = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("dp",))
    with pytest.raises(UsageError, match="the rule has no shardings"):
        config.shardings({"w": array(8, 8)})
