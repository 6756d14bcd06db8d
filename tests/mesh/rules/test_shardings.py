"""Patterns of paths: which decides, what a dimension is split over, and the fewest that cover."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automesh.errors import UsageError, WrongType
from automesh.mesh.rules.cover import fewest_patterns
from automesh.mesh.rules.shardings import Shardings, axes_of, matches, path_of, spelled_shardings


@pytest.mark.parametrize(
    ("pattern", "path", "does"),
    [
        ("params/up", "params/up", True),
        ("params/up", "params/up/w", False),
        ("params/*/up", "params/0/up", True),
        ("params/*/up", "params/a/b/up", False),
        ("params/**/up", "params/a/b/up", True),
        ("params/**/up", "params/up", True),
        ("**/up", "up", True),
        ("params/**", "params/a/b", True),
        ("params/**", "params", False),
        ("params/layer_*/w", "params/layer_12/w", True),
        ("params/a.b", "params/axb", False),
    ],
)
def test_a_pattern_matches_the_whole_of_a_path(pattern: str, path: str, does: bool) -> None:
    assert matches(pattern, path) is does


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("params['layers'][0]['up']", "params/layers/0/up"),
        ("state.opt_state[0].mu['w']", "state/opt_state/0/mu/w"),
        ("params['mlp/~/linear_0']['w']", "params/mlp/~/linear_0/w"),
        ("model.layers[1].weight", "model/layers/1/weight"),
        ("x", "x"),
        ('batch["tokens"]', "batch/tokens"),
    ],
)
def test_what_python_calls_an_array_is_a_path(name: str, path: str) -> None:
    assert path_of(name) == path


def test_the_first_pattern_that_matches_decides() -> None:
    found = Shardings({"a/up": ["x"], "**/up": ["y"]})
    firsts = [found.first(path) for path in ("a/up", "b/up", "a/down")]
    assert firsts == ["a/up", "**/up", ""]
    assert found != Shardings({"**/up": ["y"], "a/up": ["x"]})
    assert found.roots == ("a",)


def test_names_are_of_the_mapping_then_of_the_mesh() -> None:
    found = Shardings({"w": ["layers", ["heads", "fsdp"], "", "tp"]})
    over = axes_of(found["w"], {"heads": ("tp",), "layers": ()}, ("fsdp", "tp"))
    assert over == ((), ("tp", "fsdp"), (), ("tp",))


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ({"": ["a"]}, UsageError, "a part of it is empty"),
        ({"a//b": ["a"]}, UsageError, "a part of it is empty"),
        ({"a": "tp"}, WrongType, "must be a list"),
        ({"a": [5]}, WrongType, "must be a name or several"),
        ({"a": [["tp", "tp"]]}, UsageError, "has a name twice"),
        ({5: ["a"]}, WrongType, "must be a string"),
        (["ab"], WrongType, "must be a dict"),
    ],
)
def test_what_is_no_sharding_is_refused(values: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        Shardings(values)


def test_fewest_patterns_of_a_model_with_its_optimizer() -> None:
    parts = {
        "attn/q": ("embed", "heads"),
        "attn/o": ("heads", "embed"),
        "mlp/up": ("embed", "mlp"),
        "norm": ("embed",),
    }
    arrays = [
        (f"{root}/layers/{number}/{name}", tuple((part,) for part in dims))
        for root in ("params", "opt/0/mu", "opt/0/nu")
        for number in range(12)
        for name, dims in parts.items()
    ]
    arrays += [("opt/0/count", ()), ("tokens", (("batch",), ()))]
    assert spelled_shardings(fewest_patterns(arrays)) == {
        "**/layers/*/attn/q": ["embed", "heads"],
        "**/layers/*/attn/o": ["heads", "embed"],
        "**/layers/*/mlp/up": ["embed", "mlp"],
        "**/layers/*/norm": ["embed"],
        "opt/0/count": [],
        "tokens": ["batch", ""],
    }


def test_a_layer_that_is_split_in_another_way_has_its_own_pattern() -> None:
    usual, other = (("a",),), (("b",),)
    arrays = [(f"layers/{number}/w", usual) for number in range(3)] + [("layers/3/w", other)]
    found = fewest_patterns(arrays)
    assert {path: found[found.first(path)] for path, _ in arrays} == dict(arrays)


def test_a_pattern_matches_none_of_arrays_that_have_become_one() -> None:
    usual, other = (("x",), ("y",)), ()
    arrays = [("a/1", usual), ("a/a/0", other), ("1", usual), ("a/a/1", other)]
    found = fewest_patterns(arrays)
    assert {path: found[found.first(path)] for path, _ in arrays} == dict(arrays)


words = st.sampled_from(["a", "b", "0", "1", "w", "up"])
paths = st.lists(words, min_size=1, max_size=4).map("/".join)
dims = st.sampled_from([(), (("x",),), (("x",), ("y",))])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(paths, dims, max_size=12))
def test_patterns_say_of_every_array_what_was_said(arrays: dict[str, Any]) -> None:
    found = fewest_patterns(list(arrays.items()))
    assert {path: found[found.first(path)] for path in arrays} == arrays
    assert len(found) <= len(arrays)
