"""What is said of estimates that are not complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.jsonio import from_json, to_json
from automesh.report.so_far import SoFar, common_parts, what_is_missing
from tests.support.samples import results_samples


@pytest.mark.parametrize(
    ("known", "waiting", "said"),
    [
        ({"dp"}, {}, ""),
        ({"dp"}, {("dp", "tp"): 3, ("tp",): 1}, "meshes with tp"),
        ({"dp"}, {("dp", "tp"): 3, ("sp",): 1}, "meshes with tp or sp"),
        ({"dp"}, {("dp", "tp"): 1, ("dp", "sp"): 3}, "meshes with sp or tp"),
        (set(), {("dp",): 2}, "meshes with dp"),
        ({"dp", "tp"}, {("dp", "tp"): 3}, "3 plans, such as dp:2,tp:4"),
        ({"dp", "remat=full"}, {("dp", "remat=none"): 3}, "meshes with remat=none"),
        (set(), {tuple(axis): 1 for axis in "abcde"}, "5 plans, such as dp:2,tp:4"),
        (
            {"dp", "tp"},
            {("dp", "sp"): 3, ("tp",): 2, ("dp", "tp"): 1},
            "meshes with sp, and 3 plans, such as dp:2,tp:4",
        ),
    ],
)
def test_what_those_without_an_estimate_have_in_common_is_named(
    known: set[str], waiting: dict[tuple[str, ...], int], said: str
) -> None:
    assert what_is_missing(frozenset(known), waiting, lambda _: "dp:2,tp:4") == said


_PARTS = st.lists(st.sampled_from("abcdef"), unique=True, max_size=4).map(tuple)


@given(known=st.frozensets(st.sampled_from("abcdef")), waiting=st.dictionaries(_PARTS, st.just(2)))
def test_what_is_named_covers_all_that_wait_and_none_that_are_known(
    known: frozenset[str], waiting: dict[tuple[str, ...], int]
) -> None:
    named, others = common_parts(known, waiting)
    assert not known.intersection(named)
    for parts in waiting:
        assert (parts in others) == (not set(named) & set(parts))
    said = what_is_missing(known, waiting, lambda parts: f"{parts}")
    assert said.startswith("meshes with ") == bool(named)
    if others:
        assert said.endswith(f"{2 * len(others)} plans, such as {others[0]}")


def test_a_study_can_keep_it() -> None:
    rows = tuple(results_samples.estimated_candidate(plan) for plan in ("dp:4", "dp:2,tp:2"))
    so_far = SoFar(rows=rows, estimated=2, plans=9, missing="meshes with sp")
    assert from_json(to_json(so_far, SoFar), SoFar) == so_far
    assert str(so_far) == (
        "dp:4, 12.0 ms estimated (2 of 9 plans estimated; meshes with sp: not estimated yet)"
    )
