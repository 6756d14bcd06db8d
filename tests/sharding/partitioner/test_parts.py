"""Parts of mesh axes: taken, left over, and what it costs to move an array between them."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from automesh.sharding.partitioner.parts import (
    Cost,
    Part,
    PartitionedArray,
    Parts,
    count,
    overlaps,
    resharding,
    take,
    without,
)

FACTORS = (2, 2, 3)


def part(axis: str, size: int, before: int = 1) -> Part:
    return Part(axis=axis, before=before, size=size)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Part, Part]:
    """A whole axis of 12 devices, and a part of it."""
    first, last = sorted((draw(st.integers(0, 3)), draw(st.integers(0, 3))))
    before, size = math.prod(FACTORS[:first]), math.prod(FACTORS[first:last])
    return part("tp", 12), part("tp", size, before)


@given(cuts())
def test_what_is_taken_and_what_is_left_make_up_the_whole(pair: tuple[Part, Part]) -> None:
    whole, taken = pair
    left = without((whole,), (taken,))
    assert count(left) * taken.size == whole.size
    assert not overlaps(left, (taken,))
    assert overlaps((whole,), (taken,)) == (taken.size > 1)


def test_parts_of_other_axes_are_left_alone() -> None:
    assert without((part("dp", 4), part("tp", 2)), (part("dp", 4),)) == (part("tp", 2),)


@given(st.lists(st.sampled_from((2, 3, 4)), max_size=4), st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
def test_parts_are_taken_in_their_order_until_they_are_as_many(
    sizes: list[int], pieces: int
) -> None:
    parts = tuple(part(f"a{place}", size) for place, size in enumerate(sizes))
    taken = take(parts, pieces)
    if taken is not None:
        assert count(taken) == pieces
        assert count(without(parts, taken)) * pieces == count(parts)


def test_a_part_is_cut_where_it_has_too_many_devices() -> None:
    assert take((part("tp", 8),), 2) == (part("tp", 2),)
    assert take((part("tp", 3),), 2) is None


def split(*parts: Parts, size: float = 64.0) -> PartitionedArray:
    return PartitionedArray(factors=("i", "j"), parts=parts, bytes=size)


def test_a_slice_costs_nothing_and_a_gather_what_it_holds_and_sends() -> None:
    rows = split((part("dp", 2),), ())
    finer = split((part("dp", 2), part("tp", 2)), ())
    assert resharding(rows, finer) == Cost()
    assert resharding(finer, rows) == Cost(memory_bytes=16.0 + 32.0, sent_bytes=32.0)
    other = split((part("tp", 2),), ())
    assert resharding(rows, other) == Cost(memory_bytes=64.0, sent_bytes=32.0)
