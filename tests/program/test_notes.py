"""Errors in one line."""

from __future__ import annotations

import pytest

from automesh.program.notes import in_one_line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("127 does not divide\nby 2"), "ValueError: 127 does not divide"),
        # As that of `assert len(devices) == 8`; before, it ended in a colon, and the second run
        # of a script ended by an IndexError of automesh.
        (AssertionError(), "AssertionError"),
        (RuntimeError("\nwhat jax says below its first line"), "RuntimeError: what jax says below"),
    ],
)
def test_an_error_is_one_line_without_a_colon_for_no_message(error: Exception, said: str) -> None:
    line = in_one_line(error)
    assert line.startswith(said) and "\n" not in line and not line.endswith((":", ": "))
