"""Factors of dimensions: joined, taken apart, and their pieces."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.program.infer.dimensions import Dim, DimensionMark, Dimensions
from automesh.program.infer.rules.arrays import reshaped


def sizes(every: Dimensions, dim: Dim) -> list[int]:
    return [every.size(factor) for factor in every.factors(dim)]


def test_a_dimension_that_meets_two_is_taken_apart() -> None:
    every = Dimensions()
    flat, heads, inner = every.new(512), every.new(8), every.new(64)
    every.join(flat, (*heads, *inner))
    assert every.factors(flat) == (*every.factors(heads), *every.factors(inner))
    # All that is joined with it later is taken apart, too.
    other = every.new(512)
    every.join(other, flat)
    assert sizes(every, other) == [8, 64]


def test_what_does_not_fit_is_tangled() -> None:
    every = Dimensions()
    one, other = (*every.new(4), *every.new(3)), (*every.new(3), *every.new(4))
    every.join(one, other)
    assert all(every.marks(factor) & DimensionMark.TANGLED for factor in every.factors(one))
    every = Dimensions()
    one, other = (*every.new(6), *every.new(2)), (*every.new(4), *every.new(3))
    every.join(one, other)
    # What both begin with is common to them.
    assert every.factors(one)[0] == every.factors(other)[0]
    assert every.size(every.factors(one)[0]) == 2


def test_the_same_interval_is_the_same_piece() -> None:
    every = Dimensions()
    put, taken = every.new(128), every.new(128)
    real, good = every.new(64), every.piece(taken, 0, 64)
    every.join(every.piece(put, 0, 64), real)
    every.join(every.piece(put, 64, 64), every.new(64))
    assert every.factors(real) != every.factors(good)
    every.join(put, taken)
    assert every.factors(real) == every.factors(good)
    (root,) = every.factors(put)
    assert [size for (_, size), _ in every.packed(root)] == [64, 64]
    assert not every.is_cut(root)
    every.piece(put, 1, 127)  # Neighbours meet.
    assert every.is_cut(root)
    assert not every.packed(root)


@pytest.mark.parametrize("is_joined_first", [True, False])
def test_a_piece_of_a_piece_is_one_of_the_whole(is_joined_first: bool) -> None:
    """Two large and six small views are put end to end, and cut into eight."""
    every = Dimensions()
    put, cut = every.new(64), every.new(64)
    large, small = every.new(16), every.new(48)
    if is_joined_first:
        every.join(put, cut)
    every.join(every.piece(put, 0, 16), large)
    every.join(every.piece(put, 16, 48), small)
    views = [every.piece(cut, 8 * number, 8) for number in range(8)]
    if not is_joined_first:
        every.join(put, cut)
    for whole, own in ((large, views[:2]), (small, views[2:])):
        (root,) = every.factors(whole)
        found = [every.factors(dim) for _, dim in every.packed(root)]
        assert found == [every.factors(view) for view in own]
    # The largest pieces alone are what lies end to end in the whole.
    (root,) = every.factors(put)
    assert [size for (_, size), _ in every.packed(root)] == [16, 48]
    assert not every.is_cut(root)


def test_one_of_several_is_picked() -> None:
    every = Dimensions()
    both = (*(views := every.new(2)), *(rows := every.new(8)))
    assert every.piece(both, 8, 8) == rows
    assert every.marks(views[0]) & DimensionMark.PICKED


def test_a_piece_of_what_is_taken_apart_later() -> None:
    every = Dimensions()
    dim = every.new(12)
    third = every.piece(dim, 4, 4)
    every.join(dim, (*every.new(3), *(inner := every.new(4))))
    assert every.factors(third) == every.factors(inner)


@given(st.data())
def test_a_reshape_keeps_elements_and_comes_back(data: st.DataObject) -> None:
    """Into any shape and back: the factors of both sides are the same, or are marked."""
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=6))

    def shape_of(parts: list[int]) -> tuple[int, ...]:
        cuts = sorted(data.draw(st.sets(st.integers(0, len(parts)), max_size=4)) | {0, len(parts)})
        return tuple(math.prod(parts[a:b]) for a, b in itertools.pairwise(cuts))

    before = shape_of(factors)
    after = shape_of(data.draw(st.permutations(factors)))
    every = Dimensions()
    dims = every.news(before)
    there = reshaped(every, dims, before, after)
    back = reshaped(every, there, after, before)
    for size, dim in [*zip(before, dims, strict=True), *zip(after, there, strict=True)]:
        assert math.prod(sizes(every, dim)) == size
    every.join_all(dims, back)
    for first, second in zip(dims, back, strict=True):
        assert math.prod(sizes(every, first)) == math.prod(sizes(every, second))
        marked = any(every.marks(one) & DimensionMark.TANGLED for one in every.factors(first))
        assert marked or every.factors(first) == every.factors(second)
