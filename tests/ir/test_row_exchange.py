"""Rows that devices exchange, as in programs that jaxlib 0.12 compiles for CPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automesh.ir.passes.row_exchange import RowWindow, permuted_rows, rotated_rows


def _slice(rows: int, start: int, limit: int, stride: int = 1) -> RowWindow:
    return RowWindow(rows=rows, results=-(-(limit - start) // stride), low=-start, stride=stride)


@pytest.mark.parametrize(
    ("window", "parts", "expected"),
    [
        (_slice(1024, 0, 512), 2, (256,)),
        (_slice(1024, 0, 512), 4, (256, 128)),
        (_slice(1024, 0, 512), 8, (128, 64)),
        (_slice(1024, 512, 1024), 8, (64, 64)),
        (_slice(1536, 512, 1024), 4, (256, 256)),
        (_slice(1536, 512, 1024), 8, (192, 64, 128)),
        (_slice(1024, 1, 1024), 4, (1,)),
        (_slice(1024, 0, 1024, 2), 8, ()),
        # Sliding windows: what is padded at an end comes from the neighbour there.
        (RowWindow(rows=1024, results=1024, width=3, low=1), 8, (1, 1)),
        (RowWindow(rows=1024, results=256, width=4, stride=4), 8, ()),
        # All rows before: the whole array is gathered.
        (RowWindow(rows=1024, results=1024, width=1024, low=1023), 8, None),
        # Padding moves rows to devices behind, and those of the last ones to devices before.
        (RowWindow(rows=1024, results=1040, low=8), 2, ()),
        (RowWindow(rows=1024, results=1040, low=8), 4, (4, 4)),
    ],
)
def test_permutes_are_those_of_the_partitioner(
    window: RowWindow, parts: int, expected: tuple[int, ...] | None
) -> None:
    found = permuted_rows(window, parts)
    assert found == expected or (found and expected and sorted(found) == sorted(expected))


@pytest.mark.parametrize(
    ("by", "parts", "expected"),
    [(3, 8, (3,)), (-1, 8, (1,)), (300, 8, (84, 44)), (512, 2, (512,)), (0, 8, ()), (1024, 8, ())],
)
def test_a_roll_moves_its_rows_once(by: int, parts: int, expected: tuple[int, ...]) -> None:
    assert rotated_rows(1024, by, parts) == expected


@given(
    held=st.integers(1, 40),
    parts=st.sampled_from([2, 3, 4, 8]),
    ends=st.tuples(st.integers(0, 320), st.integers(0, 320)),
)
def test_permutes_carry_what_the_devices_lack(held: int, parts: int, ends: tuple[int, int]) -> None:
    """Nobody is sent less than the rows that it needs and does not hold."""
    rows = held * parts
    start, limit = sorted(min(end, rows) for end in ends)
    if start == limit:
        return
    made = -(-(limit - start) // parts)
    missing = max(
        sum(
            not place * held <= row < (place + 1) * held
            for row in range(start + place * made, min(start + (place + 1) * made, limit))
        )
        for place in range(parts)
    )
    found = permuted_rows(_slice(rows, start, limit), parts)
    assert found is None or sum(found) >= missing
    assert found is None or all(0 < count <= held for count in found)


def test_a_roll_of_uneven_parts_is_made_for_two_distances() -> None:
    # 4098 rows on four devices: two rows of padding.
    assert rotated_rows(4098, 2, 4) == (2, 4)
    assert rotated_rows(4098, 4097, 4) == (3, 1)


def test_a_roll_of_fewer_rows_than_devices_moves_none_that_are_known() -> None:
    """Before, it divided by zero, which ended estimates of a pipeline with a stage per device."""
    assert rotated_rows(8, 1, 8) == (1,)
    assert rotated_rows(8, 1, 16) == ()
