"""Matches of rules: what they mean is Python's, and how long they take is bounded."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from automesh import limits
from automesh.errors import UsageError
from automesh.mesh.config import MeshConfig
from automesh.mesh.rules.file import read_rules
from automesh.mesh.rules.pattern import check_pattern, has_few_choices, matches, nearest

# Each would try at least 2**60 ways in Python's engine.
BACKTRACKING = {
    "(t+)+x": "t" * 60,
    "(a|a)*b": "a" * 60,
    "(?:tpu-?)+ x?(.*)*y": "tpu-" * 30,
    "a?" * 60 + "a" * 60 + "b": "a" * 60,
    "((a?)(a?))*b": "a" * 60,
    "(.*.*)*=": "tpu-v5p-" * 20,
    "([a-z]+|[0-9]+|-)+x(?#why)": "tpu-v5p-" * 16,
    "(t+)(?#comment)+x": "t" * 60,
}


@pytest.mark.parametrize(("pattern", "selector"), BACKTRACKING.items())
def test_a_pattern_that_backtracks_without_end_is_matched_at_once(
    pattern: str, selector: str
) -> None:
    begun = time.monotonic()
    assert not has_few_choices(pattern)
    config = MeshConfig(
        mesh_shape=(-1,), mesh_axis_names=("data",), mesh_rules=[(pattern, (8,)), (".*", (4,))]
    )
    assert config.select(selector).mesh_shape == (4,)
    assert time.monotonic() - begun < 30  # Without the limit: years.
    assert not matches(pattern, selector, ignore_case=True)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?=tpu)(t+)+x",
        r"(a)*\1",
        "(?!v4)(.*)*x",
        "(a*)*+b",
        "(?>(a+)+)b",
        "(?x) ( a | a ) * b",
        "(?x:( a | a ) * b)",
        "((a{1000}){1000}){1000}",
    ],
)
def test_what_only_a_backtracking_engine_knows_is_refused_if_it_may_not_end(
    pattern: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="may take too long to match") as error:
        check_pattern(pattern)
    assert "not groups" in error.value.hint
    rules = tmp_path / "mesh_rules.toml"
    rules.write_text(f"axes = [\"dp\"]\n[[rule]]\nmatch = '{pattern}'\nici = {{ dp = 8 }}\n")
    with pytest.raises(UsageError, match="rule") as error:
        read_rules(rules)
    assert str(rules) in error.value.message


@pytest.mark.parametrize(
    ("pattern", "selector"),
    [
        ("tpu-(?!v4).*", "tpu-v5p-128"),
        ("(?i)TPU-v5p-(?P<n>[0-9]+)", "tpu-v5p-128"),
        (r"(tpu)-\1", "tpu-tpu"),
        ("(?:tpu|gpu)-.*(?<!-4)", "gpu-h100-8"),
        ("gpu-(p5.48xlarge|p4d.24xlarge)-(64|128|256|512|1024)", "gpu-p5.48xlarge-256"),
        ("a*+b", "aab"),
        # Of three repeats: refused before, since each counted as if it were tried by itself.
        ("(?!.*lite)tpu-.*-[0-9]+", "tpu-v5p-128"),
        (r"(?P<chip>\w+)-\w+-\w+\Z", "gpu-h100-8"),
    ],
)
def test_what_was_written_before_still_matches(pattern: str, selector: str) -> None:
    check_pattern(pattern)
    assert has_few_choices(pattern)
    assert matches(pattern, selector)
    assert not matches(pattern, "!" + selector)


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", r"\-", "-", ""]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(
            lambda two: f"({two[0]}){two[1]}"
        ),
        inner.map(lambda one: f"(?P<g>{one})" if "(?P<" not in one else one),
    ),
    max_leaves=6,
)


@given(PATTERNS, st.text("ab-", max_size=7))
@example("(a|b)*-(?:a)", "ab-a")
def test_both_engines_mean_the_same(pattern: str, selector: str) -> None:
    try:
        expected = re.compile(pattern)
    except re.error:  # The same name of a group twice.
        return
    check_pattern(pattern)
    assert matches(pattern, selector) == (expected.fullmatch(selector) is not None)
    folded = re.compile(pattern, re.IGNORECASE).fullmatch(selector.upper())
    assert matches(pattern, selector.upper(), ignore_case=True) == (folded is not None)
    part, is_beginning = nearest(pattern, selector)
    if part:
        assert expected.search(selector) is not None
        assert selector.startswith(part) or not is_beginning


@pytest.mark.parametrize("pattern", [".*.*.*x", "[^y]*[^z]*.*(a|b)", "(?=.*.*.*x)"])
def test_three_repeats_take_no_second_in_the_longest_name(pattern: str) -> None:
    begun = time.process_time()
    check_pattern(pattern)
    assert not matches(pattern, "w" * limits.TARGET_CHARS)
    assert time.process_time() - begun < 2.0


def test_the_end_of_a_name_has_one_meaning_in_both_engines() -> None:
    assert not has_few_choices(r"(tpu|-|v5p)+\Z")
    assert matches(r"(tpu|-|v5p)+\Z", "tpu-v5p")


def test_how_near_a_pattern_comes_is_told_whichever_engine_matches() -> None:
    assert nearest("tpu(-v5p)*", "tpu-v5p-128") == ("tpu-v5p", True)
    assert nearest("v5p(-[0-9])*", "tpu-v5p-1") == ("v5p-1", False)
    assert nearest("gpu(-v5p)*", "tpu-v5p-1") == ("", False)


def test_long_patterns_and_long_names_are_refused() -> None:
    with pytest.raises(UsageError, match="has 2001 characters"):
        check_pattern("a" * (limits.PATTERN_CHARS + 1))
    config = MeshConfig(mesh_shape=(-1,), mesh_axis_names=("data",))
    with pytest.raises(UsageError, match=f"selector has {limits.TARGET_CHARS + 1} characters"):
        config.select("a" * (limits.TARGET_CHARS + 1))
