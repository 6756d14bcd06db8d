"""Plain trees: names from a parallel tree or from regexes over paths; and properties of all."""

from __future__ import annotations

import doctest
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from automesh.errors import IllegalMapping, UnknownMeshAxis, UsageError, WrongType
from automesh.partition import (
    Axis,
    axis_mapping,
    current_thread_local_mapping,
    infer_resource_partitions,
    names_by_path,
    physical_axis_size,
    pspec_for,
    pspec_for_axis,
    round_axis_for_partitioning,
    shard,
)
from tests.support.partition_meshes import mesh_of
from tests.support.paths import ROOT

P = PartitionSpec
MAPPING = {"embed": "data", "mlp": "model", "vocab": ("data", "model")}
TREE = {
    "wte": {"embedding": np.ones((16, 8))},
    "layers": [{"up": {"kernel": np.ones((8, 16)), "bias": np.ones(16)}}] * 2,
    "step": np.zeros((), np.int32),
    "name": "model",
}
RULES = [
    (r"wte/embedding", ("vocab", "embed")),
    (r"layers/\d+/up/kernel$", P("embed", "mlp")),
    (r".*", P()),
]


class State(NamedTuple):
    params: Any
    moments: Any


def test_names_by_path_fit_shard() -> None:
    mesh, params = mesh_of(), {key: TREE[key] for key in ("wte", "layers", "step")}
    state = State(params=params, moments=(params, None))
    names = names_by_path(RULES, state)
    split = shard(state, {"embed": "data", "mlp": "model"}, mesh, names=names)
    for tree in (split.params, split.moments[0]):
        assert tree["wte"]["embedding"].sharding.spec == P(None, "data")
        assert tree["layers"][1]["up"]["kernel"].sharding.spec == P("data", "model")
        assert tree["layers"][0]["up"]["bias"].sharding.is_fully_replicated
        assert tree["step"].sharding.is_fully_replicated
    assert split.moments[1] is None
    specs = pspec_for(state, {"embed": "data"}, names=names)
    assert specs.params["wte"]["embedding"] == P(None, "data")
    found = infer_resource_partitions(state, {"embed": "data"}, mesh=mesh, names=names)
    assert found.moments[0]["wte"]["embedding"].spec == P(None, "data")


def test_the_first_rule_that_is_found_in_the_path_wins() -> None:
    names = names_by_path(RULES, TREE)
    assert names["wte"]["embedding"] == ("vocab", "embed")
    assert names["layers"][1]["up"] == {"kernel": P("embed", "mlp"), "bias": P()}
    assert names["step"] == () and names["name"] is None
    reverse = names_by_path(RULES[::-1], TREE)
    assert reverse["wte"]["embedding"] == P()


def test_rules_may_name_mesh_axes_as_easylm_does() -> None:
    mesh = mesh_of()
    rules = [("embedding", P("model", "data")), ("kernel", P(("data", "model"), None)), (".*", P())]
    tree = {key: TREE[key] for key in ("wte", "layers")}
    identity = {axis: axis for axis in mesh.axis_names}
    split = shard(tree, identity, mesh, names=names_by_path(rules, tree))
    assert split["wte"]["embedding"].sharding.spec == P("model", "data")
    assert split["layers"][0]["up"]["kernel"].sharding.spec == P(("data", "model"), None)


def test_wrong_rules_are_told() -> None:
    tree = {"w": np.ones((2, 2))}
    for rules, kind, told in (
        ([("x", ("a", "b"))], UsageError, "no rule names the dimensions of array `w` of shape"),
        ([("(", ("a",))], UsageError, "`(` is not a regex"),
        ([("w", ("a",))], UsageError, "array `w` has the 1 names ('a',) for its 2 dimensions"),
        ([("w", P("a", "b", "c"))], UsageError, "array `w` has the 3 names"),
        (["w"], WrongType, "a rule must be a pair"),
        ([("w", "embed")], WrongType, "a rule must be a pair"),
        ([("w", {"a": 1})], WrongType, "the names in rule `w` must be a tuple"),
        ([("w", (1, 2))], WrongType, "the name of a dimension of rule `w` must be a string"),
        ([("x", ("a", ("b", 3)))], WrongType, "the name of a dimension of rule `x` must be"),
        (5, WrongType, "the rules must be a list of pairs, got an int: 5"),
        ("w", WrongType, "the rules must be a list of pairs, got a str"),
        ({"w": ("a", "b")}, WrongType, "the rules must be a list of pairs, got a dict"),
    ):
        with pytest.raises(kind) as error:
            names_by_path(rules, tree)
        assert told in str(error.value)


def test_wrong_names_are_told() -> None:
    mesh, tree = mesh_of(), {"w": np.ones((8, 16)), "b": np.ones(16)}
    for names, kind, told in (
        ({"w": ("embed", "mlp")}, UsageError, "`names` must have the structure of the tree"),
        ({"w": "embed", "b": None}, WrongType, "the names of array `w` must be a tuple"),
        ({"w": ("embed", 3), "b": None}, WrongType, "the name of a dimension of array `w` must"),
        ({"w": ("embed",), "b": None}, UsageError, "array `w` has the 1 names"),
        ({"w": P("a", "b", "c"), "b": None}, UsageError, "array `w` has the 3 names"),
    ):
        with pytest.raises(kind) as error:
            shard(tree, MAPPING, mesh, names=names)
        assert told in str(error.value), names
    with pytest.raises(WrongType, match="`names` names dimensions of array `n`, which is an int"):
        shard({"n": 3}, MAPPING, mesh, names={"n": ("embed",)})


@dataclass
class Unregistered:
    w: Any = field(metadata={"axis_names": ("embed", "mlp")})


def test_a_dataclass_with_names_must_be_a_pytree() -> None:
    for tree, told in (
        (Unregistered(jnp.ones((8, 16))), "a Unregistered has names for its field `w`"),
        ({"up": [Unregistered(jnp.ones((8, 16)))]}, "a Unregistered at `up/0` has names"),
    ):
        for call in (
            lambda tree=tree: shard(tree, MAPPING, mesh_of()),
            lambda tree=tree: pspec_for(tree, MAPPING),
            lambda tree=tree: names_by_path([(".*", P())], tree),
        ):
            with pytest.raises(WrongType) as error:
                call()
            assert told in str(error.value)
    config = Unregistered(None)
    assert shard({"config": config}, MAPPING, mesh_of())["config"] is config


def test_arrays_without_names_are_left_alone() -> None:
    mesh, tree = mesh_of(), {"w": np.ones((8, 16)), "b": jnp.ones(16), "s": "text", "n": None}
    names = {"w": ("embed", "mlp"), "b": None, "s": None, "n": None}
    split = shard(tree, MAPPING, mesh, names=names)
    assert split["b"] is tree["b"] and split["s"] == "text" and split["n"] is None
    assert shard(tree, MAPPING, mesh)["w"] is tree["w"]
    specs = pspec_for(tree, MAPPING)
    assert specs == {"w": P(None), "b": P(None), "s": None, "n": None}
    assert pspec_for([3, True, np.float32(1)], {}) == [P(), P(), P()]


@pytest.mark.parametrize("wrong", [("", 3), ("x", -1)], ids=["no name", "negative"])
def test_wrong_axes_are_told(wrong) -> None:
    with pytest.raises(UsageError, match="an axis needs a name and a size"):
        Axis(*wrong)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Axis(3, 3),
        lambda: Axis("x", 2.0),
        lambda: Axis("x", True),
        lambda: pspec_for_axis(3, {}),
        lambda: pspec_for_axis([3], {}),
        lambda: physical_axis_size(None, {}),
        lambda: round_axis_for_partitioning("vocab", {}),
    ],
)
def test_wrong_types_of_axes_are_told(call) -> None:
    with pytest.raises(WrongType, match=r"ax(is|es)"):
        call()


def test_the_size_of_an_axis_that_is_mapped_to_one_twice_is_an_error() -> None:
    with jax.set_mesh(mesh_of()):
        for call in (
            lambda: physical_axis_size("a", {"a": ("data", "data")}),
            lambda: round_axis_for_partitioning(Axis("a", 3), {"a": ("data", "model", "data")}),
        ):
            with pytest.raises(IllegalMapping) as error:
                call()
            assert "axis `a` is mapped to the mesh axis `data` twice" in str(error.value)


LOGICAL = ("a", "b", "c")
ENTRIES = st.one_of(
    st.none(),
    st.sampled_from(["data", "model"]),
    st.permutations(["data", "model"]).map(tuple),
    st.just(()),
)
MAPPINGS = st.dictionaries(st.sampled_from(LOGICAL), ENTRIES)
SIZES = {"data": 4, "model": 2}


def axes_of(name: str | None, mapping: dict[str, Any]) -> tuple[str, ...]:
    entry = mapping.get(name) if name else None
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


@settings(max_examples=40, deadline=None)
@given(
    mapping=MAPPINGS,
    dims=st.lists(
        st.tuples(st.sampled_from([*LOGICAL, None]), st.sampled_from([1, 2, 4, 6, 8, 24])),
        max_size=3,
    ),
)
def test_an_array_is_split_as_the_mapping_says_or_not_at_all(mapping, dims) -> None:
    names, shape = tuple(name for name, _ in dims), tuple(size for _, size in dims)
    split_by = [axes_of(name, mapping) for name in names]
    parts = [math.prod(SIZES[axis] for axis in axes) for axes in split_by]
    used = [axis for axes in split_by for axis in axes]
    legal = len(set(used)) == len(used) and not any(
        size % part for size, part in zip(shape, parts, strict=True)
    )
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    run = lambda: shard(x, mapping, mesh_of(), names=names)  # noqa: E731
    if not legal:
        with pytest.raises(IllegalMapping):
            run()
        return
    split = run()
    local = tuple(size // part for size, part in zip(shape, parts, strict=True))
    assert split.sharding.shard_shape(shape) == local
    np.testing.assert_array_equal(np.asarray(split), x)
    assert split.sharding == infer_resource_partitions(x, mapping, mesh=mesh_of(), names=names)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(0, 10**6), entry=ENTRIES)
def test_a_rounded_axis_is_the_smallest_that_divides(size: int, entry) -> None:
    with jax.set_mesh(mesh_of()):
        axis = round_axis_for_partitioning(Axis("a", size), {"a": entry})
        parts = physical_axis_size("a", {"a": entry})
    assert parts == (
        None if entry is None else math.prod(SIZES[x] for x in axes_of("a", {"a": entry}))
    )
    assert axis.size % (parts or 1) == 0
    assert 0 <= axis.size - size < (parts or 1)


@settings(max_examples=30, deadline=None)
@given(outer=MAPPINGS, inner=MAPPINGS, extra=MAPPINGS, outer_wins=st.booleans())
def test_merged_mappings_are_unions_with_one_winner(outer, inner, extra, outer_wins) -> None:
    with (
        axis_mapping(outer),
        axis_mapping(inner, merge=True, outer_wins=outer_wins, **extra),
    ):
        found = current_thread_local_mapping()
    union = {**inner, **outer} if outer_wins else {**outer, **inner}
    assert found == {**union, **extra}


def test_an_unknown_axis_is_no_error_until_it_is_used() -> None:
    mesh = mesh_of()
    assert shard(np.ones(8), {"x": "absent"}, mesh, names=("y",)).sharding.is_fully_replicated
    with pytest.raises(UnknownMeshAxis):
        shard(np.ones(8), {"x": "absent"}, mesh, names=("x",))


def test_the_examples_of_the_page_run() -> None:
    page = ROOT / "docs" / "partitioning.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted > 15
    assert outcome.failed == 0
